"""Prompt caches in the format of mlx-lm 0.32.2, which become caches of this package.

The format is that of `save_prompt_cache` in mlx_lm/models/cache.py: a safetensors file with the flattened `state` of
every cache, and in its metadata, flattened too, words, class names, and which arrays stand for scalars, strings or
None. It has no checksum: only states that no cache can have are refused.
B rows, H KV heads, n slots, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
from mlx_lm.models import cache as stock
from msgspec import Meta
from msgspec.structs import astuple

from mlx_kv.cache.codecs import PLAIN, Codecs, find_codecs
from mlx_kv.cache.growth import round_up
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import Append, Layout, Ring, Row
from mlx_kv.cache.state import CacheState, in_state
from mlx_kv.files import tensor_files
from mlx_kv.files.decoding import INVALID, Array, Count, Listed, check_shape, decode, in_one_line
from mlx_kv.files.schema import check_planes
from mlx_kv.settings import MOST_TOKENS

MAX_WRITE = 512  # of the rings that are made of mlx-lm's: the default of a policy

# --- the states of mlx-lm's caches ------------------------------------------------------------------------------------


class RecurrentState(Listed):
    arrays: list[Array | None]
    left_padding: Array | None
    lengths: Array | None

    def __post_init__(self) -> None:
        check_shape(self.left_padding, "B", {}, mx.int32)
        check_shape(self.lengths, "B", {}, mx.int32)


class ConcatenateState(Listed):
    keys: Array | None  # (B, H, n, D)
    values: Array | None

    def __post_init__(self) -> None:
        _check_planes([self.keys], [self.values], PLAIN, self.tokens)

    @property
    def tokens(self) -> int:
        """In the first slots, at least."""
        return 0


class PlainState(ConcatenateState):
    offset: Count

    @property
    def tokens(self) -> int:
        return self.offset


class ChunkedState(ConcatenateState):
    offset: Count
    chunk_size: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
    start_position: Count

    @property
    def tokens(self) -> int:
        return self.offset - self.start_position


class RotatingState(ConcatenateState):
    offset: Count
    keep: Count
    max_size: Count
    index: Count

    def __post_init__(self) -> None:
        ConcatenateState.__post_init__(self)
        self.slots_by_age()

    def slots_by_age(self) -> list[int]:
        """Slots from the oldest token on, as mlx-lm's `_temporal_order` has them.

        Raises:
            ValueError: no rotating cache has such a state.
        """
        Ring(self.max_size, MAX_WRITE, self.keep)
        slots = 0 if self.keys is None else self.keys.shape[2]
        offset, keep, index, found = self.offset, self.keep, self.index, list(range(slots))
        if index > slots or (keep > index < min(slots, offset)):
            raise ValueError(f"a rotating cache that continues at slot {index} of {slots}")
        if index < slots:  # all is written, or rotated, or some is not
            found = found[:keep] + found[index:] + found[keep:index] if index < offset else found[:index]
        if not min(offset, self.max_size - 1) <= len(found) <= offset:
            raise ValueError(f"a rotating cache of {self.max_size} that holds {len(found)} of {offset} tokens")
        return found


class QuantizedState(Listed):
    keys: list[Array | None] | None  # packed, scales, biases: (B, H, n, width)
    values: list[Array | None] | None
    offset: Count
    group_size: int
    bits: int

    def __post_init__(self) -> None:
        _check_planes(self.keys or [], self.values or [], find_codecs(self.bits, self.group_size), self.offset)


def _check_planes(keys: list[Any], values: list[Any], codecs: Codecs, tokens: int) -> None:
    """Raises ValueError unless planes, or None for each, are what the codecs make of so many tokens."""
    slots = 0
    if any(plane is not None for plane in (*keys, *values)):
        check_planes(keys, values, codecs)
        slots = keys[0].shape[2]
    if not 0 <= tokens <= slots:
        raise ValueError(f"a cache that holds {tokens} tokens in {slots} slots")


STATES: dict[Any, type[Listed]] = {
    stock.ArraysCache: RecurrentState,
    stock.KVCache: PlainState,
    stock.QuantizedKVCache: QuantizedState,
    stock.RotatingKVCache: RotatingState,
    stock.ChunkedKVCache: ChunkedState,
    stock.ConcatenateKVCache: ConcatenateState,
}


# --- their conversion -------------------------------------------------------------------------------------------------


def convert(path: str | Path, file: tensor_files.TensorFile) -> tuple[list[Any], dict[str, str]]:
    """The caches of a file that mlx-lm wrote, as ours, and the metadata that was saved with them.

    Raises:
        ValueError: it is none of mlx-lm's files, or of an older version, or has a state that no cache can have.
    """
    words = file.words
    if not is_stock(words):
        raise ValueError(
            f"{path} is a safetensors file, but no prompt cache of mlx-kv or mlx-lm 0.32.2: give one that "
            "save_prompt_cache wrote"
        )
    try:
        states = _unflatten(_leaves(file))
        caches = [_converted(name, state) for name, state in zip(_unflatten(words, "1."), states, strict=True)]
    except INVALID as error:
        raise ValueError(
            f"{path} was written by mlx-lm, but cannot be used: {in_one_line(error)}; make it again"
        ) from error
    return caches, {name[2:]: word for name, word in words.items() if name.startswith("0.")}


def is_stock(words: dict[str, str]) -> bool:
    """Whether this is the metadata of a file that mlx-lm 0.32.2 wrote."""
    return "1.0" in words and words.get("2.0") == ""


def _leaves(file: tensor_files.TensorFile) -> dict[str, Any]:
    """Arrays by name, and scalars, strings and None instead of the arrays that stand for them."""
    leaves: dict[str, Any] = dict(file.arrays)
    for name, kind in _unflatten(file.words, "2.")[1:]:
        value: Any = file.arrays[name].tolist()
        leaves[name] = value if kind == "scalar" else "".join(map(chr, value)) if kind == "string" else None
    return leaves


def _unflatten(flat: Mapping[str, Any], prefix: str = "") -> Any:
    """Nested lists of values with names such as "0.1", as MLX's `tree_flatten` gives them, after this prefix.

    MLX's own inverse makes lists of any length for a name such as "99999999".

    Raises:
        LookupError, TypeError, AttributeError: a list with gaps, or names that exclude each other.
    """
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        if name.startswith(prefix):
            *path, last = name.removeprefix(prefix).split(".")
            node = tree
            for part in path:
                node = node.setdefault(part, {})
            node[last] = value

    def listed(node: Any) -> Any:
        return [listed(node[str(index)]) for index in range(len(node))] if isinstance(node, dict) else node

    return listed(tree)


def _converted(name: str, state: Any) -> Any:
    """A cache of mlx-lm's as one of ours; recurrent state stays mlx-lm's."""
    if name == "CacheList":
        return stock.CacheList(*[_converted(kind, each) for each, kind in state])  # type: ignore[no-untyped-call]
    match name:
        case "KVCache":
            plain = decode(state, PlainState)
            return _full([plain.keys], [plain.values], plain.offset)
        case "QuantizedKVCache":
            packed = decode(state, QuantizedState)
            codecs = find_codecs(packed.bits, packed.group_size)
            return _full(packed.keys, packed.values, packed.offset, codecs)
        case "RotatingKVCache":
            return _ring(decode(state, RotatingState))
        case "ArraysCache":
            return stock.ArraysCache.from_state(astuple(decode(state, RecurrentState)))  # type: ignore[no-untyped-call]
    raise ValueError(
        f"it holds a {name}, and only KVCache, QuantizedKVCache, RotatingKVCache and ArraysCache can be read"
    )


def _full(keys: Any, values: Any, offset: int, codecs: Codecs = PLAIN) -> KVCache:
    if not keys or keys[0] is None or offset == 0:
        return KVCache(codec=codecs)
    keys, values = ([plane[:, :, :offset] for plane in planes] for planes in (keys, values))
    return _made(keys, values, Row(0, offset, offset), Append(), codecs)


def _ring(state: RotatingState) -> KVCache:
    """A ring of what a rotating buffer (B, H, n, D) holds: the first `keep` tokens, and the newest."""
    offset, keep, keys, values = state.offset, state.keep, state.keys, state.values
    layout = Ring(state.max_size, MAX_WRITE, keep)
    if keys is None or values is None or offset == 0:
        return KVCache(layout=layout)
    slots = state.slots_by_age()
    held = len(slots)
    # Their positions. Those that come after the sinks are the newest; no more than the ring has room for.
    first = max(keep, offset - (held - keep), offset - layout.turn) if offset > keep else offset
    row = Row(0, offset, offset if first <= keep else first + layout.turn)  # as if so many had been written and trimmed
    positions = [*range(min(keep, offset)), *range(first, offset)]
    taken = slots[: min(keep, offset)] + slots[held - (offset - first) :]
    source: list[int] = [0] * min(offset + 1, layout.most_slots)
    for position, slot in zip(positions, taken, strict=True):
        source[layout.slot(row, position)] = slot
    index = mx.array(source)
    return _made([keys[:, :, index]], [values[:, :, index]], row, layout)


def _made(keys: list[mx.array], values: list[mx.array], row: Row, layout: Layout, codecs: Codecs = PLAIN) -> KVCache:
    """A cache of these planes (B, H, n, width) with one free slot, if the layout has one; all rows are alike."""
    rows, capacity = [row] * keys[0].shape[0], round_up(min(row.offset + 1, layout.most_slots))
    keys, values = (
        [mx.pad(plane, [(0, 0), (0, 0), (0, capacity - plane.shape[2]), (0, 0)]) for plane in planes]
        for planes in (keys, values)
    )
    mx.eval(keys, values)
    ranges, parameters = list(layout.ranges(row, 0)), list(layout.parameters)
    return KVCache.from_state(CacheState(keys, values, rows, ranges, parameters, in_state(codecs)))
