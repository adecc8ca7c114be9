"""The usual update at the least cost: one that is like the one before it.

While a sequence is decoded, every layer does for every token what it did for the last one, one slot further on. What
has to be found out for that is found once: the plan of the next step, which all layers share, is made from the plan of
this one, and of the tensors only shapes and dtypes are compared. Decides when a step is like that: anything else (a
trim, other rows, a compaction, growth, padding) takes the whole way in `update`, which comes to the same wherever both
can be gone. Whoever changes what a cache holds without giving it other rows, sets `Contents.last` to None.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_kv.cache.codecs import are_plain
from mlx_kv.cache.contents import Contents
from mlx_kv.cache.layout import Plan
from mlx_kv.cache.protocol import Fetched
from mlx_kv.cache.update import fetched


class Alike(NamedTuple):
    """What an update must be like to be a step as the one before it.

    Attributes:
        capacity: slots of the buffers.
        plain: whether tensors are their planes.
        keys_shape, values_shape, keys_dtype, values_dtype: of the tensors that were written.
    """

    capacity: int
    plain: bool
    keys_shape: tuple[int, ...]
    values_shape: tuple[int, ...]
    keys_dtype: mx.Dtype
    values_dtype: mx.Dtype


def remember(held: Contents, keys: mx.array, values: mx.array) -> None:
    """After an update that took the whole path: the next may be like it."""
    last, held.last = held.last, None
    if last is None or held.buffers is None or not (held.encoded and last.steady):
        return
    if held.lengths is not None or held.following is not None:
        return
    if held.residual is not None and held.residual.last is None:
        return
    held.last = last
    tensors = keys.shape, values.shape, keys.dtype, values.dtype
    held.alike = Alike(held.capacity, are_plain(held.codecs), *tensors)


def next_plan(held: Contents, new: int) -> Plan | None:
    """The plan of the next step, if it is to be like the last one as far as the cache knows; else None."""
    last = held.last
    if last is None or last.new != new or held.rows is not last.after:
        return None
    plan = last.next
    return plan if plan.steady else None


def step(held: Contents, keys: mx.array, values: mx.array) -> Fetched | None:
    """`KVCache.update_and_fetch`, where this update is like the last one; else None, and nothing has changed."""
    last = held.last
    if last is None or held.rows is not last.after:
        return None
    plan = last.next
    buffers, residual = held.buffers, held.residual
    if residual is not None and residual.last is None:
        return None  # a copy
    capacity, plain, keys_shape, values_shape, keys_dtype, values_dtype = held.alike
    if buffers is None or plan.needed > capacity or not plan.steady:
        return None
    try:
        alike = keys.shape == keys_shape and values.shape == values_shape
        alike = alike and keys.dtype == keys_dtype and values.dtype == values_dtype
    except AttributeError:
        return None  # no arrays: the whole way says so
    if not alike:
        return None
    if plan.bounded:
        if held.steps >= held.most_steps:
            return None  # it is time for a look at what writes want
        held.steps += 1
    if residual is not None:
        residual.step((keys, values), plan)
    written, read = plan.written, plan.read
    if not plain or written is None or read is None:
        buffers[0].write(keys, plan)
        buffers[1].write(values, plan)
        held.rows, held.ranges, held.last, held.transient = plan.after, plan.ranges, plan, None
        return fetched(held, buffers)
    held.rows, held.ranges, held.last, held.transient = plan.after, plan.ranges, plan, None
    of_keys, of_values = buffers[0].planes[0], buffers[1].planes[0]
    of_keys[written] = keys
    of_values[written] = values
    if plan.ranges[0] == (0, capacity):  # handles of their own, as a slice would be, but no operation
        return of_keys[...], of_values[...]
    return of_keys[read], of_values[read]
