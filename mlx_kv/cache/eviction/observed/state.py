"""What an observation is gone on from elsewhere, as integers and arrays.

How files store it is decided in `files.evictors`.
B rows, Hq query heads, H KV heads, D head dim; m queries, n slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_kv.cache.eviction.observed.moments import Moments
from mlx_kv.cache.eviction.observed.observation import Observation
from mlx_kv.cache.eviction.observed.recent import Piece, RecentQueries


class ObservedState(NamedTuple):
    """What a loaded observation goes on from. Files hold it as a list of the same order.

    Attributes:
        rows: of each row `since`, `end`, how many queries are held, and how many of these, the first, have their sums.
        scale: of the products; 0 where nothing was seen.
        sinks: logits of attention sinks, (Hq,), or None.
        queries, sums: as in `Together`, of the same rows, or None.
        received: (B, H, n) of float32, or None.
        counts, mean, spread: as in `Moments`, or None.
    """

    rows: list[list[int]]
    scale: float
    sinks: mx.array | None
    queries: mx.array | None
    sums: mx.array | None
    received: mx.array | None
    counts: list[int] | None
    mean: mx.array | None
    spread: mx.array | None


def state_of(observation: Observation) -> ObservedState | None:
    """None where nothing was seen."""
    since, ends, moments = observation.since, observation.ends, observation.moments
    if since == ends:
        return None
    together, none = observation.recent.together(), (0,) * len(ends)
    held = (none, none) if together is None else (together.counts, together.known)
    rows = [list(row) for row in zip(since, ends, *held, strict=True)]
    of: tuple[list[int] | None, mx.array | None, mx.array | None] = None, None, None
    if moments is not None:
        of = list(moments.counts), moments.mean, moments.spread
    queries, sums = (None, None) if together is None else (together.queries, together.sums)
    return ObservedState(rows, observation.scale, observation.sinks, queries, sums, observation.received, *of)


def go_on_from(observation: Observation, told: Sequence[Any] | None, rows: int) -> None:
    """Has an observation stand where one of this many rows stood; None is one that has seen nothing.

    Args:
        told: an `ObservedState`, or a list of the same.
    """
    observation.begin(rows)
    if told is None:
        return
    state = ObservedState(*told)
    since, ends, counts, known = zip(*state.rows, strict=True)
    observation.since, observation.ends = list(since), list(ends)
    observation.scale, observation.sinks, observation.received = state.scale, state.sinks, state.received
    if state.queries is not None:
        width = state.queries.shape[2]
        cuts = [(width - count, width - count + some) for count, some in zip(counts, known, strict=True)]
        pieces = [
            Piece(state.queries, state.sums, tuple(cuts)),
            Piece(state.queries, None, tuple([(cut, width) for _, cut in cuts])),
        ]
        held = [piece for piece in pieces if any(first < last for first, last in piece.spans)]
        observation.recent = RecentQueries(rows, held)
    if state.counts is not None and state.mean is not None and state.spread is not None:
        observation.moments = Moments(tuple(state.counts), state.mean, state.spread)
