"""Probes of the RoPE of what a model caches: keys, and values of latent attention.

Only a layer's own `rope(x, offset=...)` is called: negative offsets undo it, and its results for unit vectors are its
matrix. A RoPE is accepted only if it fits the model: a token is read at several positions over caches of zeros, and
undoing the RoPE must give the same result at each.

Each is described by pairs of channels and frequencies. Some RoPEs also scale by a factor that is the same at every
position.
H KV heads, D head dim, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.cache.eviction.calibration import Rotation
from mlx_kv.mlxlm.loading import architecture
from mlx_kv.mlxlm.probe import ProbeCache, cached_per_model, probe_caches
from mlx_kv.mlxlm.traverse import leaves

POSITIONS = (37, 3001)  # at which a token is read, besides 0, as far as the model has them
DOUBLINGS = 14  # frequencies are refined at positions 1, 2, 4, ... 2^14
MAX_ERROR = {mx.float32: 2e-3}  # of the largest element, after undoing RoPE
MAX_ERROR_16_BITS = 0.02
MIN_ROTATION = 1e-9  # below it, an element of the matrix of a rotation is 0
WIDTH_STEP = 8  # of widths, where a RoPE takes fewer channels than are cached
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx")  # in configurations
NAMES = ("rope", "rotary")  # in the names of attributes that hold a RoPE

Ropes = tuple[Rotation | None, Rotation | None]  # of keys and of values
Function = Callable[..., mx.array]


@cached_per_model
def cache_ropes(model: nn.Module, which: tuple[int, ...]) -> tuple[Ropes, ...]:
    """The RoPE of the keys and of the values in some of a model's caches; None where nothing is rotated.

    Args:
        which: indices of caches, in the order of `leaves`.

    Raises:
        ValueError: keys or values change with the position, and no RoPE of the model undoes it.
    """
    positions = (0, *sorted({max(1, min(at, _length(model) - 1)) for at in POSITIONS}))
    stored = [_stored(model, position) for position in positions]
    candidates = _Candidates(model)
    found = []
    for index in which:
        if any(index not in each for each in stored):
            raise ValueError(
                f"cannot probe what layer {index} of {architecture(model)} caches: the model does not run over caches "
                "of zeros. Measure budgets of heads only"
            )
        ropes = []
        for part, name in enumerate(("keys", "values")):
            tensors = [each[index][part] for each in stored]
            what = f"the {name} in layer {index} of {architecture(model)}"
            ropes.append(_found(tensors, positions, candidates, index, what))
        found.append((ropes[0], ropes[1]))
    return tuple(found)


def _length(model: nn.Module) -> int:
    """Positions that a model has: a token beyond learned ones would be read out of bounds."""
    known = (getattr(getattr(model, "args", None), name, None) for name in LENGTHS)
    return min([length for length in known if type(length) is int and length > 1], default=max(POSITIONS) + 1)


def _stored(model: nn.Module, position: int) -> dict[int, tuple[mx.array, mx.array]]:
    """What one token at a position has cached: (1, H, 1, D) keys and values by cache."""
    caches = probe_caches(model, position)
    try:
        answer = model(mx.zeros((1, 1), mx.int32), cache=caches)
        own = {i: c.given for i, c in enumerate(leaves(caches)) if isinstance(c, ProbeCache) and c.given is not None}
        mx.eval(answer, list(own.values()))
    except Exception:  # a model that needs mlx-lm's own caches
        return {}
    return {i: given for i, given in own.items() if given[0].ndim == given[1].ndim == 4}


class _Candidates:
    """The RoPEs of a model, those of a layer first.

    Args:
        model: any model of mlx-lm.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = list(getattr(model, "layers", []))
        self._of_layer = [list(_rope_functions(layer)) for layer in layers]
        distinct = {id(rope): rope for rope in _rope_functions(model)}
        self._all = list(distinct.values())
        self._measured: dict[tuple[int, int], Rotation | None] = {}

    def has_own(self, index: int) -> bool:
        """Whether a layer has a RoPE."""
        return index >= len(self._of_layer) or bool(self._of_layer[index])

    def rotations(self, index: int, dim: int) -> Iterator[Rotation]:
        """Rotations of D channels, as they are and moved to the last channels (keys of which a part is rotated)."""
        own = self._of_layer[index] if index < len(self._of_layer) else []
        for rope in [*own, *self._all]:
            key = id(rope), dim
            if key not in self._measured:
                widths = (dim, *range(dim - dim % WIDTH_STEP, 0, -WIDTH_STEP))  # some take only what they rotate
                measured = (measured_rotation(rope, width) for width in widths)
                self._measured[key] = next((rotation for rotation in measured if rotation is not None), None)
            rotation = self._measured[key]
            if rotation is None:
                continue
            yield rotation
            width = int(rotation.pairs.max().item()) + 1  # type: ignore[arg-type]
            if width < dim:
                yield rotation._replace(pairs=rotation.pairs + (dim - width))


def _rope_functions(module: nn.Module) -> Iterator[Function]:
    for part in module.modules():  # type: ignore[no-untyped-call]
        for name in part:
            if any(word in name for word in NAMES) and callable(part[name]):
                yield part[name]
        for name, value in vars(part).items():
            if any(word in name for word in NAMES) and callable(value):
                yield value


def measured_rotation(rope: Function, dim: int) -> Rotation | None:
    """What a RoPE does to D channels, measured on unit vectors.

    Args:
        rope: (x, offset=...), of (B, heads, S, D).
        dim: D.

    Returns:
        None if it is called otherwise, or does something else than rotating pairs of channels by a constant angle per
        position.
    """
    try:
        at_zero, *powers = [_matrix(rope, dim, position) for position in (0, *[2**i for i in range(DOUBLINGS + 1)])]
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):
        return None
    mixed = sum(np.abs(matrix) for matrix in powers)
    np.fill_diagonal(mixed, 0)
    first, second = np.nonzero(np.triu(mixed > MIN_ROTATION))
    if not len(first) or len({*first, *second}) != 2 * len(first):
        return None
    factors = at_zero[first, first]
    if np.ptp(factors) > 1e-5 * abs(factors[0]):
        return None
    angles = np.array([np.arctan2(matrix[first, second], matrix[first, first]) for matrix in powers])
    frequencies = angles[0]  # radians at position 1, refined by those at 2, 4, ...
    for power, angle in enumerate(angles[1:], start=1):
        turns = np.round((frequencies * 2**power - angle) / (2 * np.pi))
        frequencies = (angle + 2 * np.pi * turns) / 2**power
    pairs = mx.array(np.stack([first, second], axis=1).astype(np.int32))
    return Rotation(pairs, mx.array(frequencies.astype(np.float32)), mx.array(float(factors.mean())))


def _matrix(rope: Function, dim: int, position: int) -> np.ndarray:
    """(D, D) of float64: each row is what RoPE makes of a unit vector."""
    rotated = rope(mx.eye(dim)[None, :, None], offset=position)
    if rotated.shape != (1, dim, 1, dim):
        raise ValueError("a RoPE that changes the shape")
    return np.array(rotated[0, :, 0].astype(mx.float32), dtype=np.float64)


def _found(
    tensors: Sequence[mx.array], positions: Sequence[int], candidates: _Candidates, index: int, what: str
) -> Rotation | None:
    """The rotation that makes what was cached the same at every position.

    Args:
        tensors: (1, H, 1, D), at each of the positions.
        what: they are, for the message.

    Raises:
        ValueError: there is none.
    """
    dtype, plain = tensors[0].dtype, [x.astype(mx.float32) for x in tensors]
    if plain[0].size == 0 or _same(plain, dtype):
        return None
    places = [mx.full((1, 1, 1), position) for position in positions]
    for rotation in candidates.rotations(index, plain[0].shape[3]):
        if _same([rotation.undo(x, at) for x, at in zip(plain, places, strict=True)], dtype):
            return rotation
    if not _same([mx.linalg.norm(x, axis=-1) for x in plain], dtype) and not candidates.has_own(index):
        return None  # learned positions, added before the projection: a part of what is stored, and no RoPE
    raise ValueError(
        f"{what} change with the position, and no RoPE of the model undoes it: measure budgets of heads only"
    )


def _same(tensors: Sequence[mx.array], dtype: mx.Dtype) -> bool:
    first, bound = tensors[0], MAX_ERROR.get(dtype, MAX_ERROR_16_BITS)
    largest = mx.abs(first).max()
    return all(bool((mx.abs(x - first).max() <= bound * largest).item()) for x in tensors[1:])
