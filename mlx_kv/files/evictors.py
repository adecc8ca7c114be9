"""What a file says of an evictor: whether any can know that.

Decides what of a description is refused; what is made of it, the cache room does. Knows nothing about files.
B rows, H KV heads, Hq query heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_kv.cache.checks import whole_number
from mlx_kv.cache.eviction.allocation import BY_HEAD
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.eviction.membership import EvictorState
from mlx_kv.cache.eviction.observed.state import ObservedState
from mlx_kv.cache.eviction.scores.tokens import Wants
from mlx_kv.cache.layout import Budget, Row

ALWAYS = 7  # fields of an `EvictorState` that every version wrote
AT_DEFAULT = EvictorState("", "layers", 0, [], None, None, [])


def check_lists(*trees: Any) -> None:
    """Raises ValueError for what is no list."""
    if not all(type(tree) is list for tree in trees):
        raise ValueError("something else than a list")


def whole(name: str, value: object, least: int = 0) -> int:
    """A whole number, and nothing that only passes for one.

    Raises:
        ValueError: another value.
    """
    if type(value) is not int:
        raise ValueError(f"{name} is {str(value)[:40]!r}, which is no whole number")
    return whole_number(name, value, least)


def eviction_in_short(told: Sequence[Any]) -> list[Any]:
    """The fields of an `EvictorState` up to the last that is not at its default: earlier versions had fewer."""
    short = list(told)
    while len(short) > ALWAYS:
        default = AT_DEFAULT[len(short) - 1]
        if short[-1] is not default and (default is None or short[-1] != default):
            break
        short.pop()
    return short


def check_eviction(layout: Budget, rows: Sequence[Row], heads: int | None, told: Sequence[Any]) -> None:
    """Raises ValueError for what no evictor knows."""
    check_lists(told)
    if len(told) != len(eviction_in_short(told)):
        raise ValueError("what evicts is told otherwise than it is written")
    score, share, layer, names, positions, scores, work, dead, layers, observed, reread = EvictorState(*told)
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
    made = Evictor(layout, score, share, layers=layers)  # refuses what does not exist
    known, table = made.score, None if isinstance(made.layers, str) else [list(row) for row in made.layers]
    written: Any = layers
    if table is not None and (layer >= len(table) or table != written):
        raise ValueError("a table of budgets that is not written so, or of fewer layers")
    if evicted and (positions is None or (known.per_token and scores is None)):
        raise ValueError("tokens whose positions or scores nobody knows")
    own = heads if share in BY_HEAD else 1
    for array, dtype in ((positions, mx.int32), (scores, mx.float32)):
        if array is None:
            continue
        # Nothing is recorded of rows that have evicted nothing, and their cut may be after those of others.
        shape, least = (len(rows), own), max([layout.cut_of(row) for row in rows if row.evicted > 0], default=0)
        if heads is None or type(array) is not mx.array or (array.shape[:2], array.dtype) != (shape, dtype):
            raise ValueError("positions or scores of other tokens")
        if array.ndim != 3 or array.shape[2] < least:
            raise ValueError("positions or scores of other tokens")
    _check_dead(layout, rows, heads, dead, made)
    _check_observed(known.wants, rows, heads, observed)
    _check_reread(rows, heads, reread)
    if positions is not None and not 0 <= mx.min(positions).item() <= mx.max(positions).item() <= max(  # type: ignore[operator]
        row.offset for row in rows
    ):
        raise ValueError("positions that there are not")


def _check_dead(
    layout: Budget, rows: Sequence[Row], heads: int | None, dead: mx.array | None, evictor: Evictor
) -> None:
    """Raises ValueError for heads of other lengths than their rows stand for."""
    exact = evictor.layers in ("uniform", "pyramid")  # the heads of each layer hold its budget on average
    if dead is None:
        lost = any(row.longer for row in rows) if exact else any(row.evicted > 0 for row in rows)
        if lost and (exact or evictor.uneven_heads):
            raise ValueError("heads of which nobody knows the lengths")
        return
    told = type(dead) is mx.array and (dead.shape, dead.dtype) == ((len(rows), heads), mx.int32)
    if not evictor.uneven_heads or not told or heads is None:
        raise ValueError("lengths of other heads")
    gaps: list[list[int]] = dead.tolist()  # type: ignore[assignment]
    for row, own in zip(rows, gaps, strict=True):
        fits = 0 == min(own) <= max(own) <= layout.cut_of(row) - layout.sinks
        if row.evicted > 0 and not (fits and (not exact or sum(own) == heads * row.longer)):
            raise ValueError("heads that do not hold their share of a budget")


def _check_observed(wants: Wants | None, rows: Sequence[Row], heads: int | None, told: Sequence[Any] | None) -> None:
    """Raises ValueError for what was never seen of attention."""
    if told is None:
        return
    check_lists(told)
    seen = ObservedState(*told)
    if wants is None or not wants.observes or heads is None or len(seen.rows) != len(rows):
        raise ValueError("attention that nobody wanted to see")
    check_lists(seen.rows, *seen.rows)
    for row, own in zip(rows, seen.rows, strict=True):
        since, end, held, known = (whole("a position", number) for number in own)
        if not (known <= held <= end - since and end <= max(0, row.offset)):
            raise ValueError("queries of other tokens")
    if type(seen.scale) is not float or not 0 < abs(seen.scale) < math.inf:
        raise ValueError("a scale that is none")
    most = max(held for _, _, held, _ in seen.rows)
    if (seen.queries is None) != (most == 0):
        raise ValueError("queries that there are not")
    query_heads, dim = None, None
    if seen.queries is not None:
        _check_array(seen.queries, (len(rows), None, None, None), None)
        _, query_heads, width, dim = seen.queries.shape
        if width < most or query_heads % heads:
            raise ValueError("queries of other heads")
        if any(known for *_, known in seen.rows) and wants.received and seen.sums is None:
            raise ValueError("queries whose sums nobody knows")
        if seen.sums is not None:
            _check_array(seen.sums, (len(rows), query_heads, width), mx.float32)
    if seen.sinks is not None:
        _check_array(seen.sinks, (query_heads,), None)
    if seen.received is not None:
        _check_array(seen.received, (len(rows), heads, None), mx.float32)
    if seen.counts is None:
        if seen.mean is not None or seen.spread is not None:
            raise ValueError("moments of no queries")
        return
    check_lists(seen.counts)
    if len(seen.counts) != len(rows) or min(whole("queries", count) for count in seen.counts) < 0:
        raise ValueError("moments of other rows")
    _check_array(seen.mean, (len(rows), query_heads, dim), mx.float32)
    _check_array(seen.spread, (*seen.mean.shape, seen.mean.shape[2]), mx.float32)  # type: ignore[union-attr]


def _check_reread(rows: Sequence[Row], heads: int | None, told: Sequence[Any] | None) -> None:
    """Raises ValueError for what no tokens of these rows can have received when they were read again."""
    if told is None:
        return
    check_lists(told)
    if len(told) != len(rows) or heads is None:
        raise ValueError("a second reading of other rows")
    for row, own in zip(rows, told, strict=True):
        if own is None:
            continue
        check_lists(own)
        first, received = own
        _check_array(received, (heads, None), mx.float32)
        if not 0 < received.shape[1] <= row.offset - whole("a position", first):
            raise ValueError("a second reading of tokens that there are not")


def _check_array(x: object, shape: tuple[int | None, ...], dtype: mx.Dtype | None) -> None:
    """Raises ValueError unless it is an array of this shape, where None is any length, and dtype, None being floats."""
    if not isinstance(x, mx.array) or x.ndim != len(shape):
        raise ValueError("something else than an array")
    if any(wanted not in (None, length) for wanted, length in zip(shape, x.shape, strict=True)):
        raise ValueError("an array of another shape")
    if x.dtype != dtype if dtype is not None else not mx.issubdtype(x.dtype, mx.floating):
        raise ValueError("an array of another dtype")
