"""What an evictor knows, in the description of a saved cache: checked before an evictor is made of it, and made short.

Decides what of it no evictor could have said. Knows nothing about files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.eviction.granularity import BY_HEAD
from mlx_kv.cache.eviction.membership import EvictorState
from mlx_kv.cache.layout import Budget, Row
from mlx_kv.files.told import check_lists, whole


def eviction_in_short(told: Sequence[Any]) -> list[Any]:
    """The fields of an `EvictorState` up to the last that is not at its default: earlier versions had fewer."""
    state, short = EvictorState(*told), list(told)
    while (name := EvictorState._fields[len(short) - 1]) in state._field_defaults:
        if short[-1] is not state._field_defaults[name] and short[-1] != state._field_defaults[name]:
            break
        short.pop()
    return short


def check_eviction(layout: Budget, rows: Sequence[Row], heads: int | None, told: Sequence[Any]) -> None:
    """Raises ValueError for what no evictor knows."""
    check_lists(told)
    if len(told) != len(eviction_in_short(told)):
        raise ValueError("what evicts is told otherwise than it is written")
    score, share, layer, names, positions, scores, work, dead, layers = EvictorState(*told)
    check_lists(names, work)
    if not all(type(word) is str for word in (score, share, *names)) or len(names) not in (1, len(rows)):
        raise ValueError("sequences of other rows")
    whole("layer", layer)
    by_row = work if work and type(work[0]) is list else [work]  # version 0.1.0 counted all rows together
    if len(by_row) != len(names) and by_row is work:
        raise ValueError("work on other rows")
    for counts in by_row:
        check_lists(counts)
        moved, compactions, seconds = counts
        whole("moved", moved)
        whole("compactions", compactions)
        if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
            raise ValueError("seconds that are none")
    evicted = any(row.evicted > 0 for row in rows)
    known = Evictor(layout, score, share, layers=layers).score  # refuses what does not exist
    if evicted and (positions is None or (known.per_token and scores is None)):
        raise ValueError("tokens whose positions or scores nobody knows")
    own = heads if share in BY_HEAD else 1
    for array, dtype in ((positions, mx.int32), (scores, mx.float32)):
        if array is None:
            continue
        shape, least = (len(rows), own), max(map(layout.cut_of, rows))
        if heads is None or type(array) is not mx.array or (array.shape[:2], array.dtype) != (shape, dtype):
            raise ValueError("positions or scores of other tokens")
        if array.ndim != 3 or array.shape[2] < least:
            raise ValueError("positions or scores of other tokens")
    _check_dead(layout, rows, heads, share, dead)
    if positions is not None and not 0 <= mx.min(positions).item() <= mx.max(positions).item() <= max(  # type: ignore[operator]
        row.offset for row in rows
    ):
        raise ValueError("positions that there are not")


def _check_dead(layout: Budget, rows: Sequence[Row], heads: int | None, share: str, dead: mx.array | None) -> None:
    """Raises ValueError for heads of other lengths than their rows stand for."""
    if dead is None:
        if any(row.longer for row in rows):
            raise ValueError("heads of which nobody knows the lengths")
        return
    told = type(dead) is mx.array and (dead.shape, dead.dtype) == ((len(rows), heads), mx.int32)
    if share != "adaptive" or not told or heads is None:
        raise ValueError("lengths of other heads")
    gaps: list[list[int]] = dead.tolist()  # type: ignore[assignment]
    for row, own in zip(rows, gaps, strict=True):
        if row.longer and not (0 == min(own) <= max(own) <= layout.cut_of(row) and sum(own) == heads * row.longer):
            raise ValueError("heads that do not hold their share of a budget")
