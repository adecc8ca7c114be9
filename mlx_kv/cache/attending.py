"""Attention over a cache whose keys and values mlx-lm cannot read, or whose budget observes it.

B rows, Hq query heads, S queries, Dv head dim of values.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_kv.cache import update
from mlx_kv.cache.attention import Dense, Operand, PackedAnswer, Partial, ResidualAnswer, attend_partly, operand_of
from mlx_kv.cache.codecs import are_plain
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.head_groups import WORTH, HeadGroups
from mlx_kv.cache.layout import Budget, count_slots
from mlx_kv.cache.protocol import Call
from mlx_kv.cache.state import CacheData


def attend(data: CacheData, call: Call, alone: bool) -> mx.array:
    """As `KVCache.attend`.

    Args:
        alone: whether no other hook reads what the cache returned.
    """
    if data.groups is not None:
        return data.groups.attend(call)
    evictor, answer = data.evictor, _answer_of(data)
    if evictor is None or not evictor.wants_attention:
        return call.forward() if answer is None else answer.attend(call)
    if evictor.uneven_heads:
        call = _complete(data, call)
    answered = evictor.attend(call if answer is None else call.before(answer), data.rows, data.counts)
    if data.groupable:
        data.groupable = False
        if alone:
            _group(data, call, answered)
    return answered


def attend_tails(data: CacheData, call: Call) -> Partial:
    """Attention after an update, to be merged with that over the segments that the rows share."""
    evictor, answer = data.evictor, _answer_of(data)
    evictor = evictor if evictor is not None and evictor.wants_attention else None
    call = call if evictor is None else evictor.masked(call, data.rows, data.counts)
    keys: Operand
    values: Operand
    if answer is not None:
        keys, values, mask = answer.operands(call)
    elif data.packed:  # mlx-lm's attention reads these
        keys, values = (
            operand_of(codec, planes, call.queries.dtype)
            for codec, planes in zip(data.codecs, (call.keys, call.values), strict=True)
        )
        mask = call.mask
    else:
        keys, values, mask = Dense(call.keys), Dense(call.values), call.mask
    partial = attend_partly(call.queries, keys, values, call.scale, mask)
    if evictor is None:
        return partial
    return partial._replace(mixed=evictor.observed(call, partial.mixed, data.rows, data.counts))


def _answer_of(data: CacheData) -> PackedAnswer | ResidualAnswer | None:
    """What computes the attention where mlx-lm cannot."""
    residual = data.residual
    if residual is not None and residual.places is not None and data.encoded:
        return ResidualAnswer(residual, residual.places, data.packings if data.packed else None)
    return PackedAnswer(*data.packings) if data.packed and data.packings is not None else None


def _complete(data: CacheData, call: Call) -> Call:
    """The call over all slots, if heads were in groups during the update, and no longer are."""
    if data.packed or data.buffers is None or call.keys.shape[2] >= count_slots(data.ranges):
        return call
    keys, values = update.fetched(data, data.buffers)
    return call.changed(keys=keys, values=values)


def _group(data: CacheData, call: Call, answered: mx.array) -> None:
    """Puts the heads into groups, if they differ enough."""
    evictor, layout, buffers, (row, *others) = data.evictor, data.layout, data.padded, data.rows
    if others or evictor is None or buffers is None or not isinstance(layout, Budget) or not are_plain(data.codecs):
        return
    if row.shared or call.sinks is not None or (dead := _dead_slots(evictor)) is None:
        return
    cut, after = layout.cut_of(row), layout.keep_recent + layout.slack + 1
    groups = HeadGroups(buffers, [cut - slots for slots in dead], cut, after, row.end, call.queries.shape[1])
    if row.end <= groups.most and groups.nbytes < WORTH * sum(each.nbytes for each in buffers):
        mx.eval(answered, groups.arrays)  # a pending read would keep the one buffer
        data.padded, data.groups = None, groups


def _dead_slots(evictor: Evictor) -> list[int] | None:
    """Dead slots before the cut in each head of a single row; None where there are none, or others read slots."""
    dead = evictor.metadata.kept.dead
    if dead is None or evictor.paused or evictor.observation is not None or evictor.second_pass is not None:
        return None
    return dead[0].tolist()  # type: ignore[return-value]
