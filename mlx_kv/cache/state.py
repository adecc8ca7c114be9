"""What another cache needs to go on where this one stands: its state, a pytree with names.

Decides what of a cache that is; room and padding that were announced and the growth rule are none of it, a cache that
is made of a state is told them anew. States as tuples of eleven, as version 0.1.0 made them, are read, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_kv.cache.buffers import SlotBuffer
from mlx_kv.cache.codecs import PLAIN, Affine, Codec, Codecs, Plain, Planes, find_codec, find_codecs
from mlx_kv.cache.contents import Contents
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.growth import DEFAULT, Growth
from mlx_kv.cache.holding import released
from mlx_kv.cache.layout import Budget, Row, make_layout
from mlx_kv.cache.residual import Residual

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32, "float64": mx.float64}
Tensors = list[tuple[int, str]]  # head dim and name of the dtype, of keys and of values


class CacheState(NamedTuple):
    """Everything to continue from: `mx.eval` evaluates it, `tree_flatten` walks it.

    Attributes:
        keys, values: planes (B, H, C, width); None before the first update.
        rows: where each stands, as the numbers of a `Row`.
        ranges: the slots [first, last) that the last fetch was made of.
        layout: the layout's `parameters`.
        codecs: of keys and of values, each a name and parameters.
        tensors: head dim and name of the dtype, of keys and of values; None where the planes of these codecs tell it.
        encoded: whether the planes are made by the codecs; before `quantized_start` they are plain.
        quantized_start, packed_decode: as in `KVCache`.
        packed: whether the last fetch handed out packed planes.
        eviction: what the evictor knows; None without one.
        residual: of a residual its length, its room, the lowest position of each row, and its keys and values
            (B, H, slots, D), which are left out before the first update; None without one.
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


def state_of(held: Contents) -> CacheState:
    """Its arrays are handles of their own: what happens to the cache later does not reach them."""
    keys, values, tensors = None, None, None
    if held.buffers is not None:
        keys, values = (buffer.handles() for buffer in held.buffers)
        tensors = [(buffer.head_dim, str(buffer.dtype).rpartition(".")[2]) for buffer in held.buffers]
    return CacheState(
        keys,
        values,
        [list(row) for row in held.rows],
        [list(one) for one in held.ranges],
        list(released(held).parameters),
        in_state(held.codecs),
        tensors,
        held.encoded and held.buffers is not None,
        held.quantized_start,
        held.packed_decode,
        held.packed,
        None if held.evictor is None else held.evictor.state,
        None if held.residual is None else held.residual.state,
    )


def contents_of(
    state: tuple[Any, ...],
    growth: Growth = DEFAULT,
    reserved: int = 0,
    announced: tuple[int, ...] | None = None,
    lengths: tuple[int, ...] | None = None,
) -> Contents:
    """Contents that go on from a state.

    Args:
        state: a `CacheState`, or an older tuple.
        growth, reserved, announced, lengths: as in `CacheView`; no state tells them.

    Raises:
        ValueError: a codec or a score that nobody registered here.
    """
    told = _named(state)
    keys, values = (find_codec(name, parameters) for name, parameters in told.codecs)
    layout = make_layout(*told.layout)
    evictor = None
    if told.eviction is not None and isinstance(layout, Budget):
        evictor = Evictor.from_state(layout, told.eviction)
    held = Contents(
        (keys, values),
        layout,
        evictor,
        growth,
        reserved,
        told.quantized_start,
        told.packed_decode,
        (0,) * len(told.rows) if announced is None else announced,
        lengths,
        tuple(Row(*row) for row in told.rows),
        ranges=tuple((first, last) for first, last in told.ranges),
        packed=told.packed,
        residual=None if told.residual is None else Residual.from_state(told.residual),
    )
    if told.keys is not None and told.values is not None:
        codecs, planes = held.codecs if told.encoded else PLAIN, (tuple(told.keys), tuple(told.values))
        tensors = told.tensors or [tensor_told_by(*each) for each in zip(codecs, planes, strict=True)]
        own_keys, own_values = (
            SlotBuffer(codec, each, head_dim, DTYPES[dtype])
            for codec, each, (head_dim, dtype) in zip(codecs, planes, tensors, strict=True)
        )
        held.buffers, held.encoded = (own_keys, own_values), told.encoded
    return held


def _named(state: tuple[Any, ...]) -> CacheState:
    if len(state) in (len(CacheState._fields), len(CacheState._fields) - 1):
        return CacheState(*state)
    keys, values, rows, ranges, layout, bits, group_size, quantized_start, packed_decode, packed, eviction = state
    encoded = bits is None or (keys is not None and len(keys) > 1)
    codecs = in_state(find_codecs(bits, group_size))
    flags = encoded, quantized_start, packed_decode, packed
    return CacheState(keys, values, rows, ranges, layout, codecs, None, *flags, eviction)


def tensor_told_by(codec: Codec, planes: Planes) -> tuple[int, str]:
    """The head dim and the name of the dtype, where planes alone tell them: plain ones, and quantised by `Affine`.

    Raises:
        ValueError: planes of another codec.
    """
    width, dtype = planes[0].shape[3], str(planes[-1].dtype).rpartition(".")[2]
    if isinstance(codec, Affine):
        return width * 32 // codec.bits, dtype
    if isinstance(codec, Plain):
        return width, dtype
    raise ValueError(f"planes of the codec {codec.name} do not tell what they stand for: give the state its tensors")
