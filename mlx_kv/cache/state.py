"""The state of a cache as a pytree: what another cache needs to continue from here.

Without announced room, announced padding and the growth rule, which a cache made from a state gets anew.
B rows, H KV heads, C slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_kv.cache.buffers import Buffers, SlotBuffer
from mlx_kv.cache.codecs import PLAIN, Affine, Codec, Codecs, Plain, Planes, find_codec, find_codecs
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.growth import DEFAULT, Growth
from mlx_kv.cache.layout import Budget, Layout, make_layout
from mlx_kv.cache.residual import Residual

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32, "float64": mx.float64}
Tensors = list[tuple[int, str]]  # head dim and name of the dtype, of keys and of values


class CacheParts(NamedTuple):
    """What a cache is assembled of; parts and settings that were checked together, as by a `CachePolicy`."""

    codecs: Codecs
    layout: Layout
    evictor: Evictor | None = None
    residual: Residual | None = None
    growth: Growth = DEFAULT
    reserved: int = 0
    quantized_start: int = 0
    packed_decode: bool = True


def check_residual(residual: Residual | None, layout: Layout, evictor: Evictor | None) -> None:
    """Raises ValueError unless a residual can stand beside a layout and an evictor."""
    if residual is not None:
        keep_recent = None if evictor is None else evictor.layout.keep_recent
        residual.check_beside(layout.max_rollback, keep_recent, evictor is not None and evictor.uneven_heads)


def cut_chain(chain: tuple[tuple[Any, int], ...], tokens: int) -> tuple[tuple[Any, int], ...]:
    """The first tokens of a chain."""
    kept = []
    for segment, count in chain:
        if tokens > 0:
            kept.append((segment, min(count, tokens)))
        tokens -= count
    return tuple(kept)


class CacheState(NamedTuple):
    """Everything to continue from: `mx.eval` evaluates it, `tree_flatten` walks it.

    Attributes:
        keys, values: planes (B, H, C, width); None before the first update.
        rows: the numbers of each `Row`.
        ranges: the slots [first, last) that the last fetch returned.
        layout: the layout's `parameters`.
        codecs: of keys and of values, each a name and parameters.
        tensors: head dim and name of the dtype, of keys and of values; None where they follow from the planes.
        encoded: whether the planes are made by the codecs; before `quantized_start` they are plain.
        quantized_start, packed_decode: as in `KVCache`.
        packed: whether the last fetch returned packed planes.
        eviction: the evictor's state; None without one.
        residual: length, room, lowest position of each row, and keys and values (B, H, slots, D), absent before the
            first update; None without a residual.
    """

    keys: Planes | list[mx.array] | None
    values: Planes | list[mx.array] | None
    rows: list[Any]
    ranges: list[Any]
    layout: list[Any]
    codecs: list[Any]
    tensors: Tensors | None = None
    encoded: bool = True
    quantized_start: int = 0
    packed_decode: bool = True
    packed: bool = False
    eviction: Sequence[Any] | None = None
    residual: Sequence[Any] | None = None


def in_state(codecs: Codecs) -> list[Any]:
    """Two codecs by their names and parameters."""
    return [[codec.name, codec.parameters] for codec in codecs]


def named_state(state: tuple[Any, ...]) -> CacheState:
    """A `CacheState` from one, or from an older tuple: of twelve (without a residual), or of eleven (version 0.1.0)."""
    if len(state) in (len(CacheState._fields), len(CacheState._fields) - 1):
        return CacheState(*state)
    keys, values, rows, ranges, layout, bits, group_size, quantized_start, packed_decode, packed, eviction = state
    encoded = bits is None or (keys is not None and len(keys) > 1)
    codecs = in_state(find_codecs(bits, group_size))
    flags = encoded, quantized_start, packed_decode, packed
    return CacheState(keys, values, rows, ranges, layout, codecs, None, *flags, eviction)


def tensor_of_planes(codec: Codec, planes: Planes) -> tuple[int, str]:
    """The head dim and the name of the dtype, where they follow from the planes: plain or quantised by `Affine`.

    Raises:
        ValueError: planes of another codec.
    """
    width, dtype = planes[0].shape[3], str(planes[-1].dtype).rpartition(".")[2]
    if isinstance(codec, Affine):
        return width * 32 // codec.bits, dtype
    if isinstance(codec, Plain):
        return width, dtype
    raise ValueError(f"planes of the codec {codec.name} do not tell what they stand for: give the state its tensors")


def restored(value: tuple[Any, ...], growth: Growth, reserved: int) -> tuple[CacheState, CacheParts, Buffers | None]:
    """The state of a tuple, perhaps an older one, and the parts and buffers of a cache that continues from it.

    Raises:
        ValueError: a codec or a score that is not registered in this process, or parts that don't go together.
    """
    state = named_state(value)
    layout, evictor = make_layout(*state.layout), None
    if isinstance(layout, Budget):
        evictor = Evictor(layout) if state.eviction is None else Evictor.from_state(layout, state.eviction)
    residual = None if state.residual is None else Residual.from_state(state.residual)
    check_residual(residual, layout, evictor)
    of_keys, of_values = (find_codec(name, parameters) for name, parameters in state.codecs)
    settings = growth, reserved, state.quantized_start, state.packed_decode
    parts = CacheParts((of_keys, of_values), layout, evictor, residual, *settings)
    if state.keys is None or state.values is None:
        return state, parts, None
    codecs, planes = parts.codecs if state.encoded else PLAIN, (tuple(state.keys), tuple(state.values))
    tensors = state.tensors or [tensor_of_planes(*each) for each in zip(codecs, planes, strict=True)]
    keys, values = (
        SlotBuffer(codec, each, head_dim, DTYPES[dtype])
        for codec, each, (head_dim, dtype) in zip(codecs, planes, tensors, strict=True)
    )
    return state, parts, (keys, values)
