"""Probes: how a model of mlx-lm uses its caches, found by running the model, since no list of models stays complete.

Each probe runs once for a model. Most pass a few tokens through the model over `ProbeCache`s, which record how they are
used. Graphs are built and dropped; nothing is evaluated (unless the model itself evaluates something). Probes of
attention are in `attention`. A RoPE is accepted only if it
fits the model: a token is read at several positions over caches of zeros, and undoing the RoPE must give the same
result at each.
B rows, N new tokens, K slots.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Concatenate, ParamSpec, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as stock

from mlx_kv.cache.checks import check_type
from mlx_kv.cache.eviction.calibration import Rotation
from mlx_kv.mlxlm.traverse import leaves, mapped

P = ParamSpec("P")
T = TypeVar("T")
ATTENTION = {stock.KVCache, stock.QuantizedKVCache, stock.RotatingKVCache, stock.ChunkedKVCache}
# A length at which whatever a model does in long texts only has begun. Graphs of any length cost the same.
FAR = 1 << 20
# Rows, when each has a length of its own: as no model has heads, so that no axis of rows passes for one of heads.
ROWS = 13
# Dead slots, when they are to make a difference: blocks of any size have more than one more then.
MORE_SLOTS = 4097
FETCHES = ("update_and_fetch", "keys_and_values")
Stored = tuple[tuple[int, ...], mx.Dtype]  # the shape and the dtype of keys or values
_results: dict[int, dict[Any, Any]] = {}
# Of RoPE.
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


_is_forked = False


def check_not_forked() -> None:
    """Called where MLX is about to be used.

    Raises:
        RuntimeError: this process was forked from one that had used it. MLX would wait for threads that are not here.
    """
    if _is_forked:
        raise RuntimeError(
            "this process was forked after MLX had been used, whose threads it does not have: start it in another way "
            "(multiprocessing's 'spawn'), or fork before a model is loaded"
        )
    _watch_forks()


@functools.cache
def _watch_forks() -> None:
    def mark() -> None:
        global _is_forked
        _is_forked = True

    os.register_at_fork(after_in_child=mark)


def check_model(name: str, model: object) -> None:
    """Raises TypeError where an argument is no model, and RuntimeError as `check_not_forked`."""
    check_not_forked()
    check_type(name, model, nn.Module, "give a model, as mlx_kv.load returns it")


def architecture(model: nn.Module) -> str:
    """The name of the file that a model comes from; of one that reads images, the library's."""
    return type(getattr(model, "of_library", model)).__module__.rpartition(".")[2]


# --- results, kept for each model -------------------------------------------------------------------------------------


def cached_per_model(probe: Callable[Concatenate[nn.Module, P], T]) -> Callable[Concatenate[nn.Module, P], T]:
    """Decorates a function of a model: each result is computed once, and kept for as long as the model lives."""

    @functools.wraps(probe)
    def cached(model: nn.Module, *args: P.args, **kwargs: P.kwargs) -> T:
        results, key = _results_of(model), (probe.__name__, args, tuple(kwargs.items()))
        if key not in results:
            results[key] = probe(model, *args, **kwargs)
        result: T = results[key]
        return result

    return cached  # type: ignore[return-value]


def copy_results(model: nn.Module, other: nn.Module, *probes: Callable[[nn.Module], Any]) -> None:
    """Gives a model the results of another one: a part of a split model may not be able to run alone."""
    for probe in probes:
        _results_of(model)[probe.__name__, (), ()] = probe(other)


def _results_of(model: nn.Module) -> dict[Any, Any]:
    if id(model) not in _results:  # models compare and hash as the dicts that they are
        _results[id(model)] = {}
        weakref.finalize(model, _results.pop, id(model), None)
    return _results[id(model)]


# --- caches that record how they are used -----------------------------------------------------------------------------


class ProbeCache:
    """A layer's cache of zeros, at any position, which records how the model uses it.

    Args:
        position: tokens that were read before.
        extra: dead slots after the last token, which the mask hides.
        rows: of the batch; each is one token shorter than the one before it.
        packed: group size and bits of the planes that it returns; None for plain arrays.
    """

    start_position = 0

    def __init__(self, position: int, extra: int = 0, rows: int = 1, packed: tuple[int, int] | None = None) -> None:
        self._position, self._extra, self._rows, self._packed = position, extra, rows, packed
        self.windows: list[int | None] = []  # of the masks that were made
        self.written = False
        self.has_values = True  # whether the values that it was given are more than the keys again, or nothing
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.stored: tuple[mx.array, mx.array] | None = None  # the last keys and values that were to be stored

    @property
    def offset(self) -> int | mx.array:
        return self._position if self._rows == 1 else self._position - mx.arange(self._rows)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        self.windows.append(window_size)
        if self._position == 0 and self._rows == 1:
            return stock.create_attention_mask(N, 0, return_array, window_size)
        shape = (N, self._position + N + self._extra)
        return mx.ones(shape if self._rows == 1 else (self._rows, 1, *shape), dtype=mx.bool_)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self._position += keys.shape[2]
        self.stored = keys, values
        self.written, self.has_values = True, values is not keys and values.shape[3] > 0
        self.keys, self.values = (
            mx.zeros((*x.shape[:2], self._position + self._extra, x.shape[3]), x.dtype) for x in (keys, values)
        )
        return self.keys_and_values()

    def keys_and_values(self) -> Any:
        stored: Any = self.keys, self.values
        if self._planes is None:
            return stored
        group_size, bits = self._planes
        return tuple(mx.quantize(x, group_size=group_size, bits=bits) for x in stored)

    @property
    def _planes(self) -> tuple[int, int] | None:
        """Group size and bits of what is handed out; None also where keys and values differ in head dim."""
        if self.keys is None or self.values is None or self.keys.shape[3] != self.values.shape[3]:
            return None
        return self._packed

    @property
    def group_size(self) -> int:
        return self._of_planes(0)

    @property
    def bits(self) -> int:
        return self._of_planes(1)

    def _of_planes(self, which: int) -> int:
        if self._planes is None:
            raise AttributeError("only packed planes have bits and a group size")
        return self._planes[which]

    def maybe_trim_front(self) -> None:
        pass


def probe_caches(
    model: nn.Module,
    position: int,
    packed: tuple[int, int] | None = None,
    plain: frozenset[int] = frozenset(),
    **how: int,
) -> list[Any]:
    """The model's own list of caches, with a `ProbeCache` for each of attention.

    Args:
        plain: the numbers of those, in the order of `leaves`, that never return packed planes.
    """
    number = count()

    def replaced(cache: Any) -> Any:
        index = next(number)
        if type(cache) not in ATTENTION:
            return cache
        # In chunks, the model makes the mask itself, of the slots from the front on: there are no others.
        options = how | {"extra": 0} if type(cache) is stock.ChunkedKVCache else how
        return ProbeCache(position, packed=None if index in plain else packed, **options)

    return mapped(stock.make_prompt_cache(model), replaced)


# --- building graphs --------------------------------------------------------------------------------------------------


class _Built(Exception):  # noqa: N818 - it is no error
    """Ends the building of a graph."""


def graph_error(
    model: nn.Module, shape: tuple[int, int], caches_at: Callable[[int], list[Any]], position: int = FAR
) -> str | None:
    """The error that building the graph of tokens (B, S) after `position` others raises; None where it is built.

    Args:
        shape: of the tokens.
        caches_at: makes the caches of a model that has read so many tokens; called again after a first failure.
    """

    def build(tokens: mx.array, position: int) -> None:
        model(tokens, cache=caches_at(position))
        raise _Built

    tokens = mx.zeros(shape, mx.int32)
    try:
        # In a trace nothing can be evaluated: so far into a text that would take all memory.
        mx.export_function(lambda part: None, lambda traced: build(traced, position), tokens)
    except _Built:
        return None
    except Exception as error:
        if "[eval]" not in str(error):
            return in_words(error)
    try:  # a model that evaluates something on its way: then not so far
        build(tokens, min(position, 2 * ROWS))
    except _Built:
        pass
    except Exception as error:
        return in_words(error)
    return None


def in_words(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")


# --- how a model uses its caches --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheUsage:
    """How a model used its caches in one step of two tokens.

    Attributes:
        fault: the error that the model raises also with mlx-lm's own caches; None where it runs.
        windows: the widest window of a mask, by the window that its cache was made for.
        indexers: the numbers of the caches, in the order of `leaves`, that store the keys of an indexer of sparse
            attention: values are empty or the keys again.
        masked_by_unwritten: whether a mask came from a cache that no layer writes to.
        shapes: (B, H, S, D) and dtype of keys and of values, by the number of the cache that they were written to.
    """

    fault: str | None = None
    windows: tuple[tuple[int, int], ...] = ()
    indexers: frozenset[int] = frozenset()
    masked_by_unwritten: bool = False
    shapes: tuple[tuple[int, tuple[Stored, ...]], ...] = ()


@cached_per_model
def cache_usage(model: nn.Module) -> CacheUsage:
    """How the model uses its caches when it reads its first two tokens."""
    stock_caches = list(leaves(stock.make_prompt_cache(model)))
    if not any(type(cache) in ATTENTION for cache in stock_caches):
        return CacheUsage()
    caches, tokens = probe_caches(model, 0), mx.zeros((1, 2), mx.int32)
    try:
        model(tokens, cache=caches)
    except Exception:
        try:
            model(tokens, cache=stock.make_prompt_cache(model))
        except Exception as error:
            return CacheUsage(fault=in_words(error))
        return CacheUsage()  # it needs what only mlx-lm's own caches have
    windows: dict[int, int] = {}
    seen = [(index, cache) for index, cache in enumerate(leaves(caches)) if isinstance(cache, ProbeCache)]
    for index, cache in seen:
        if type(stock_caches[index]) is stock.RotatingKVCache:
            size = stock_caches[index].max_size
            windows[size] = max(windows.get(size, 0), *(window or 0 for window in cache.windows), 0)
    return CacheUsage(
        None,
        tuple((size, widest) for size, widest in windows.items() if widest > size),
        frozenset(index for index, cache in seen if cache.written and not cache.has_values),
        any(cache.windows and not cache.written for _, cache in seen),
        tuple((i, tuple((x.shape, x.dtype) for x in c.stored)) for i, c in seen if c.stored is not None),
    )


def window_of(model: nn.Module, made_for: int) -> int:
    """The window of layers with caches made for a window of `made_for`: that of the model's mask, if it is wider."""
    return max(made_for, dict(cache_usage(model).windows).get(made_for, 0))


def indexers(model: nn.Module) -> frozenset[int]:
    """The caches of the indexers of sparse attention, by their numbers in the order of `leaves`."""
    return cache_usage(model).indexers


@cached_per_model
def takes_packed(model: nn.Module, group_size: int, bits: int) -> bool:
    """Whether attention in every layer works on packed planes, at any length.

    It does in mlx-lm's shared attention function, unless the model has attention sinks; mostly not in models with a
    function of their own, nor with masks that have an axis for query heads.
    """
    return not any(_objects(model, new, packed=(group_size, bits)) for new in (1, 2))


@cached_per_model
def refuses_ragged(model: nn.Module) -> str | None:
    """Why the rows of a batch cannot have different lengths; None where they can."""
    for new in (1, 2):
        if (why := _objects(model, new, rows=ROWS)) is not None:
            return f"its attention is not made for them ({why})"
    if cache_usage(model).masked_by_unwritten:
        return "it asks a layer without attention for the mask"
    if counts_slots(model):
        return "its attention counts the slots of the longest one"
    return None


def _objects(model: nn.Module, new: int, rows: int = 1, **how: Any) -> str | None:
    """The error of `new` tokens after many others; None where the graph can be built."""
    if "packed" in how:
        how["plain"] = indexers(model)
    return graph_error(model, (rows, new), lambda position: probe_caches(model, position, rows=rows, **how))


# --- positions that are counted in slots ------------------------------------------------------------------------------


@cached_per_model
def counts_slots(model: nn.Module) -> bool:
    """Whether a model's attention derives positions from the number of slots that a cache returns, not from offsets.

    Two graphs are compared, of the same tokens at the same positions before more or fewer dead slots: where a model
    derives a position from slots, the numbers in them differ.
    """
    try:
        fewer, more = (_numbers(model, extra) for extra in (0, MORE_SLOTS))
    except Exception:
        return _reads_shapes(model)
    return fewer != more


def _numbers(model: nn.Module, extra: int) -> Counter[str]:
    """The numbers in the graph of two tokens: single constants, and what ranges begin, end and step with."""
    numbers: Counter[str] = Counter()

    def look(part: dict[str, Any]) -> None:
        if part["type"] == "constants":
            numbers.update(repr(array.item()) for _, array in part["constants"] if array.size == 1)
        elif part.get("name") == "Arange":
            numbers[repr(part["arguments"])] += 1

    caches = probe_caches(model, FAR, extra=extra)
    with mx.stream(mx.cpu):  # custom kernels, which an export does not show, are for GPUs only
        mx.export_function(look, lambda tokens: model(tokens, cache=caches), mx.zeros((1, 2), mx.int32))
    return numbers


def _reads_shapes(model: nn.Module) -> bool:
    """Whether the model's source reads the shape of anything that a cache returned.

    For graphs that cannot be inspected: some primitives have no name in an export. It is a coarser test: most models
    that read a shape derive no position from it.
    """
    files = {type(module).__module__ for module in model.modules()}  # type: ignore[no-untyped-call]
    for name in sorted(file for file in files if not file.startswith("mlx.")):
        try:
            tree = ast.parse(inspect.getsource(sys.modules[name]))
        except (OSError, KeyError, TypeError, SyntaxError):
            return True
        fetched = {
            part.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and any(getattr(call, "attr", "") in FETCHES for call in ast.walk(node.value))
            for target in node.targets
            for part in ast.walk(target)
            if isinstance(part, ast.Name)
        }
        shapes = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "shape")
        if any(isinstance(of, ast.Name) and of.id in fetched for of in shapes):
            return True
    return False


# --- RoPE of what is cached: a layer's own `rope` on unit vectors is its matrix, and negative offsets undo it ---------


@cached_per_model
def cache_ropes(model: nn.Module, which: tuple[int, ...]) -> tuple[Ropes, ...]:
    """The RoPE of the keys and of the values in some of a model's caches; None where nothing is rotated.

    Args:
        which: indices of caches, in the order of `leaves`.

    Raises:
        ValueError: keys or values change with the position, and no RoPE of the model undoes it.
    """
    # A token beyond learned positions would be read out of bounds.
    known = (getattr(getattr(model, "args", None), name, None) for name in LENGTHS)
    length = min([each for each in known if type(each) is int and each > 1], default=max(POSITIONS) + 1)
    positions = (0, *sorted({max(1, min(at, length - 1)) for at in POSITIONS}))
    stored = [_stored_at(model, position) for position in positions]
    candidates = _Candidates(model)
    by_cache = []
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
            ropes.append(_find_rotation(tensors, positions, candidates, index, what))
        by_cache.append((ropes[0], ropes[1]))
    return tuple(by_cache)


def _stored_at(model: nn.Module, position: int) -> dict[int, tuple[mx.array, mx.array]]:
    """What one token at a position has cached: (1, H, 1, D) keys and values by cache."""
    caches = probe_caches(model, position)
    try:
        answer = model(mx.zeros((1, 1), mx.int32), cache=caches)
        stored = {i: c.stored for i, c in enumerate(leaves(caches)) if isinstance(c, ProbeCache) and c.stored}
        mx.eval(answer, list(stored.values()))
    except Exception:  # a model that needs mlx-lm's own caches
        return {}
    return {i: pair for i, pair in stored.items() if pair[0].ndim == pair[1].ndim == 4}


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
        of_layer = self._of_layer[index] if index < len(self._of_layer) else []
        for rope in [*of_layer, *self._all]:
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


def _find_rotation(
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
