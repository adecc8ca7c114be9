"""Prompt caches in the format of mlx-lm 0.32.2: its files become our caches, and ours its files where it can hold them.

Decides where a token of a buffer that mlx-lm rotates belongs in a ring of ours, and the other way round. The format is
`save_prompt_cache` in mlx_lm/models/cache.py: a safetensors file with the flattened `state` of every cache, and in its
metadata, flattened too, words, class names, and which arrays stand for scalars, strings or None. It has no checksum:
only what cannot be is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock

from mlx_kv.cache.checks import MOST_TOKENS
from mlx_kv.cache.codecs import affine_of, are_plain, find_codecs, in_words
from mlx_kv.cache.growth import round_up
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import Append, Layout, Ring, Row
from mlx_kv.cache.state import CacheState, in_state
from mlx_kv.files import tensor_files
from mlx_kv.files.planes import Planes, check_planes

MAX_WRITE = 512  # of the rings that are made of mlx-lm's: the default of a policy

# --- theirs to ours ---------------------------------------------------------------------------------------------------


def convert(path: str | Path, file: tensor_files.TensorFile) -> tuple[list[Any], dict[str, str]]:
    """The caches of a file that mlx-lm wrote, as ours, and the words that were saved with them.

    Raises:
        ValueError: it is none of mlx-lm's files, or of an older version, or a cache in it cannot be what it says.
    """
    words = file.words
    classes = _listed(words, "1")
    if not is_stock(words):
        raise ValueError(
            f"{path} is a safetensors file, but no prompt cache of mlx-kv or mlx-lm 0.32.2: give one that "
            "save_prompt_cache wrote"
        )
    try:
        leaves = _leaves(file)
        caches = [_ours(name, _state(leaves, str(index))) for index, name in enumerate(classes)]
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        why = str(error).splitlines()[0] if isinstance(error, ValueError) else "a cache in it is not what it should be"
        raise ValueError(f"{path} was written by mlx-lm, but cannot be used: {why}; make it again") from error
    return caches, {name[2:]: word for name, word in words.items() if name.startswith("0.")}


def is_stock(words: dict[str, str]) -> bool:
    """Whether this is the metadata of a file that mlx-lm 0.32.2 wrote."""
    return "1.0" in words and words.get("2.0") == ""


def _listed(words: dict[str, str], prefix: str) -> list[str]:
    """prefix.0, prefix.1 and so on, as far as they go."""
    found: list[str] = []
    while (name := f"{prefix}.{len(found)}") in words:
        found.append(words[name])
    return found


def _leaves(file: tensor_files.TensorFile) -> dict[str, Any]:
    """Every array by its name, and in place of those that stand for something else, what they stand for."""
    leaves: dict[str, Any] = dict(file.arrays)
    count = 1
    while (name := file.words.get(f"2.{count}.0")) is not None:
        kind = file.words[f"2.{count}.1"]
        told: Any = file.arrays[name].tolist()
        if kind == "scalar":
            leaves[name] = told
        elif kind == "string":
            leaves[name] = "".join(map(chr, told))
        else:
            leaves[name] = None
        count += 1
    return leaves


def _state(leaves: dict[str, Any], prefix: str) -> Any:
    """The lists that were flattened to names with this prefix."""
    if prefix in leaves:
        return leaves[prefix]
    found: list[Any] = []
    while any(name == (at := f"{prefix}.{len(found)}") or name.startswith(at + ".") for name in leaves):
        found.append(_state(leaves, at))
    return found


def check_state(name: str, state: Any) -> None:
    """Whether a cache of a class of mlx-lm can have this state.

    Raises:
        ValueError, TypeError: it cannot.
    """
    if name == "ArraysCache":
        arrays, *padding = state
        if type(arrays) is not list or not all(x is None or type(x) is mx.array for x in (*arrays, *padding)):
            raise ValueError("a recurrent state of something else than arrays")
        if len(padding) != 2 or any(x is not None and (x.ndim != 1 or x.dtype != mx.int32) for x in padding):
            raise ValueError("lengths of a recurrent state that are none")
        return
    keys, values, *numbers = state
    if not all(type(number) is int and 0 <= number <= MOST_TOKENS for number in numbers):
        raise ValueError("a cache that says how long it is in something else than numbers")
    wanted = {"KVCache": 1, "QuantizedKVCache": 3, "RotatingKVCache": 4, "ChunkedKVCache": 3, "ConcatenateKVCache": 0}
    if len(numbers) != wanted[name]:
        raise ValueError(f"a {name} has {wanted[name]} numbers, and this one {len(numbers)}")
    bits, group_size = (numbers[2], numbers[1]) if name == "QuantizedKVCache" else (None, 64)
    codecs = find_codecs(bits, group_size)
    offset = numbers[0] if numbers else 0
    if _absent(keys) and _absent(values):
        held = 0
    else:
        keys, values = (planes if type(planes) is list else [planes] for planes in (keys, values))
        check_planes(keys, values, codecs)
        held = keys[0].shape[2]
    if name in ("KVCache", "QuantizedKVCache") and offset > held:
        raise ValueError(f"a cache says that it holds {offset} tokens, and has {held} slots")
    if name == "ChunkedKVCache" and not (0 <= offset - numbers[2] <= held and numbers[1] > 0):
        raise ValueError(f"a cache says that it holds {offset - numbers[2]} tokens, and has {held} slots")
    if name == "RotatingKVCache":
        _in_time(held, *numbers)


def _absent(planes: Any) -> bool:
    return planes is None or (type(planes) is list and all(plane is None for plane in planes))


def _ours(name: str, state: Any) -> Any:
    """The cache of a class of mlx-lm with this state, as one of ours; recurrent state stays mlx-lm's."""
    if name in ("KVCache", "QuantizedKVCache", "RotatingKVCache", "ArraysCache"):
        check_state(name, state)
    if name == "KVCache":
        keys, values, offset = state
        return _full((keys,), (values,), offset)
    if name == "QuantizedKVCache":
        keys, values, offset, group_size, bits = state
        return _full(keys, values, offset, bits, group_size)
    if name == "RotatingKVCache":
        return _ring(*state)
    if name == "ArraysCache":
        return stock.ArraysCache.from_state(state)  # type: ignore[no-untyped-call]
    if name == "CacheList":
        return stock.CacheList(*[_ours(kind, each) for each, kind in state])  # type: ignore[no-untyped-call]
    raise ValueError(
        f"it holds a {name}, and only KVCache, QuantizedKVCache, RotatingKVCache and ArraysCache can be read"
    )


def _full(keys: Any, values: Any, offset: int, bits: int | None = None, group_size: int = 64) -> KVCache:
    if keys is None or keys[0] is None or offset == 0:
        return KVCache(bits, group_size)
    rows = [Row(0, offset, offset)] * keys[0].shape[0]
    keys, values = ([_padded(plane[:, :, :offset], offset + 1) for plane in planes] for planes in (keys, values))
    return _made(keys, values, rows, ((0, offset),), Append(), bits, group_size)


def _ring(keys: Any, values: Any, offset: int, keep: int, max_size: int, index: int) -> KVCache:
    """A ring of what a rotating buffer (B, H, n, D) holds: the first `keep` tokens, and the newest."""
    layout = Ring(max_size, MAX_WRITE, keep)
    if keys is None or offset == 0:
        return KVCache(layout=layout)
    slots = _in_time(keys.shape[2], offset, keep, max_size, index)
    held = len(slots)
    # Their positions. Those that come after the sinks are the newest; no more than the ring has room for.
    first = max(keep, offset - (held - keep), offset - layout.turn) if offset > keep else offset
    row = Row(0, offset, offset if first <= keep else first + layout.turn)  # as if so many had been written and trimmed
    positions = [*range(min(keep, offset)), *range(first, offset)]
    taken = slots[: min(keep, offset)] + slots[held - (offset - first) :]
    capacity = min(offset + 1, layout.most_slots)
    source: list[int] = [0] * capacity
    for position, slot in zip(positions, taken, strict=True):
        source[layout.slot(row, position)] = slot
    index_of = mx.array(source)
    keys, values = ([_padded(plane[:, :, index_of], capacity)] for plane in (keys, values))
    return _made(keys, values, [row] * keys[0].shape[0], layout.ranges(row, 0), layout)


def _in_time(size: int, offset: int, keep: int, max_size: int, index: int) -> list[int]:
    """The slots of a rotating buffer of `size` slots in the order of time, as its _temporal_order has it.

    Raises:
        ValueError: there is no such buffer.
    """
    Ring(max_size, MAX_WRITE, keep)
    slots = list(range(size))
    if not 0 <= index <= size or (keep > index < min(size, offset)):
        raise ValueError(f"a rotating cache goes on at slot {index} of {size}")
    if index < size:  # all is written, or rotated, or some is not
        slots = slots[:keep] + slots[index:] + slots[keep:index] if index < offset else slots[:index]
    held = len(slots)
    if held > offset or (held < offset and held < max_size - 1):
        raise ValueError(f"a rotating cache of {max_size} says that it read {offset} tokens, and holds {held}")
    return slots


def _padded(plane: mx.array, slots: int) -> mx.array:
    """A plane (B, H, n, width) of at least `slots` slots, those that are new being zeros."""
    whole = mx.pad(plane, [(0, 0), (0, 0), (0, round_up(slots) - plane.shape[2]), (0, 0)])
    mx.eval(whole)
    return whole


def _made(
    keys: Planes,
    values: Planes,
    rows: Sequence[Row],
    ranges: tuple[tuple[int, int], ...],
    layout: Layout,
    bits: int | None = None,
    group_size: int = 64,
) -> KVCache:
    codecs = in_state(find_codecs(bits, group_size))
    return KVCache.from_state(
        CacheState(tuple(keys), tuple(values), list(rows), list(ranges), layout=list(layout.parameters), codecs=codecs)
    )


# --- ours to theirs ---------------------------------------------------------------------------------------------------


def save(path: str | Path, caches: Sequence[Any], words: dict[str, str]) -> None:
    """Writes a file that mlx-lm 0.32.2 loads.

    Raises:
        ValueError: a cache that its format cannot hold, or a name that does not end in .safetensors.
    """
    if Path(path).suffix != ".safetensors":
        raise ValueError(f"{path}: mlx-lm reads files of the name *.safetensors only; give such a name")
    arrays: dict[str, mx.array] = {}
    scalars: list[tuple[str, str]] = []
    classes = []
    for index, cache in enumerate(caches):
        name, state = _theirs(cache, index)
        classes.append(name)
        _flatten(state, str(index), arrays, scalars)
    header = {f"0.{name}": word for name, word in words.items()} | {f"1.{i}": name for i, name in enumerate(classes)}
    header["2.0"] = ""
    for count, (name, kind) in enumerate(scalars, 1):
        header |= {f"2.{count}.0": name, f"2.{count}.1": kind}
    tensor_files.write(path, arrays, header)


def _flatten(tree: Any, name: str, arrays: dict[str, mx.array], scalars: list[tuple[str, str]]) -> None:
    if isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            _flatten(item, f"{name}.{index}", arrays, scalars)
        return
    arrays[name] = tree
    if not isinstance(tree, mx.array):
        kind = "none" if tree is None else "string" if isinstance(tree, str) else "scalar"
        scalars.append((name, kind))
        arrays[name] = mx.array([] if tree is None else [ord(c) for c in tree] if isinstance(tree, str) else tree)


def _theirs(cache: Any, index: int) -> tuple[str, Any]:
    """The class of mlx-lm, and the state of it, that goes on as this cache would."""
    if type(cache) is stock.CacheList:
        return "CacheList", [tuple(reversed(_theirs(member, index))) for member in cache.caches]
    if isinstance(cache, stock.ArraysCache):  # also one that can go back: a file has what it is now
        return stock.ArraysCache.__name__, cache.state
    if not isinstance(cache, KVCache):
        name = type(cache).__name__
        if getattr(stock, name, None) is not type(cache):
            raise ValueError(f"cache {index} is a {name}, which mlx-lm cannot load: use mlx_kv.make_prompt_cache")
        return name, cache.state
    view, mend = cache.view, "leave out format='mlx-lm'"
    layout, buffers = view.layout, view.buffers
    if len(view.rows) != 1:
        raise ValueError(
            f"cache {index} has {len(view.rows)} rows, and mlx-lm's format holds one: extract it, or {mend}"
        )
    row = view.rows[0]
    # Before quantized_start, plain.
    codecs = view.codecs if buffers is None else (buffers[0].codec, buffers[1].codec)
    plain, affine = are_plain(codecs), affine_of(codecs)
    if layout.chunk_size is not None or row.evicted > 0 or row.offset < 0:
        what = "chunks" if layout.chunk_size is not None else "evicted tokens" if row.evicted > 0 else "left padding"
        raise ValueError(f"cache {index} has {what}, which mlx-lm's format cannot hold: {mend}")
    if view.residual_length:
        raise ValueError(f"cache {index} holds newest tokens as they came, and mlx-lm has no such thing: {mend}")
    if not plain and affine is None:
        raise ValueError(f"cache {index} stores {in_words(codecs)}, and mlx-lm has no such thing: {mend}")
    if layout.window is not None:
        if not plain:
            raise ValueError(f"cache {index} is a quantised ring, and mlx-lm has no such thing: {mend}")
        held = min(row.offset, layout.window)
        positions = [*range(min(layout.sinks, held)), *range(row.offset - max(held - layout.sinks, 0), row.offset)]
        slots = [[layout.slot(row, position) for position in positions]]
        rotating = (row.offset, layout.sinks, layout.window, held)
        if buffers is None or not held:
            return "RotatingKVCache", (None, None, *rotating)
        keys, values = (buffer.take(slots)[0] for buffer in buffers)
        return "RotatingKVCache", (keys, values, *rotating)
    if not plain and not view.packed_decode:
        raise ValueError(
            f"cache {index} is a quantised one of a model whose attention cannot take packed planes, which is what "
            f"mlx-lm's gives it: {mend}"
        )
    planes: list[Any] = [None, None]
    if buffers is not None and row.offset:
        planes = [[plane[:, :, : row.offset] for plane in buffer.planes] for buffer in buffers]
    if affine is None:
        return "KVCache", (*(None if p is None else p[0] for p in planes), row.offset)
    return "QuantizedKVCache", (*planes, row.offset, affine.group_size, affine.bits)
