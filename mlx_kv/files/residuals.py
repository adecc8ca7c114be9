"""Newest tokens as they came, in JSON and named arrays, and back: a part of what `described` says of a cache.

A description may be made up: what is restored was checked to be what a residual can be.
B rows, H KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_kv.cache.checks import MOST_TOKENS
from mlx_kv.cache.residual import ROOM, Residual
from mlx_kv.cache.state import DTYPES, Tensors
from mlx_kv.files.evictors import check_lists, whole


def describe_residual(state: Sequence[Any], name: str, arrays: dict[str, mx.array]) -> dict[str, Any]:
    """The `state` of a `Residual`; its keys and values go to `arrays`, under names that begin with `name`."""
    length, room, first, planes = state
    arrays |= {f"{name}.{index}": plane for index, plane in enumerate(planes)}
    return {"length": length, "room": room, "first": first, "stored": bool(planes)}


def restore_residual(
    told: dict[str, Any],
    name: str,
    arrays: dict[str, mx.array],
    offsets: Sequence[int],
    heads: int | None,
    tensors: Tensors | None,
) -> list[Any]:
    """The `state` that was described; its arrays are taken out of `arrays`.

    Args:
        offsets: of the rows.
        heads, tensors: H, and head dim and dtype of keys and of values; None where nothing is stored.

    Raises:
        ValueError, LookupError: no residual of such rows is like that.
    """
    if told.keys() != {"length", "room", "first", "stored"}:
        raise ValueError("newest tokens that are told otherwise than they are")
    length, room, first = whole("a length", told["length"]), whole("room", told["room"]), told["first"]
    check_lists(first)
    if not 1 <= length <= MOST_TOKENS or room != ROOM or type(told["stored"]) is not bool:
        raise ValueError(f"newest tokens of no length, or beside which there is other room than for {ROOM}")
    if told["stored"] != (tensors is not None):
        raise ValueError("newest tokens that there are not")
    if not told["stored"]:
        if any(first):
            raise ValueError("positions of no tokens")
        return [length, room, first, []]
    if len(first) != len(offsets) or not all(
        type(least) is int and max(0, offset - length - room) <= least <= max(0, offset)
        for least, offset in zip(first, offsets, strict=True)
    ):
        raise ValueError("newest tokens of other rows")
    assert tensors is not None
    planes = [arrays.pop(f"{name}.{index}") for index in range(2)]
    slots = Residual(length, room).slots + 1
    for plane, (dim, dtype) in zip(planes, tensors, strict=True):
        if plane.shape != (len(offsets), heads, slots, dim) or plane.dtype != DTYPES[dtype]:
            raise ValueError("newest tokens of other shapes")
    return [length, room, first, planes]
