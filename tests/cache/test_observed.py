"""What is seen of attention stays what a slow reference knows that keeps every query and every weight.

The reference says of each query which tokens it saw, and how much it gave to each; of trims, rows and evictions it
knows only which tokens are there. A property: any order of writes, padding, trims, compactions, copies and batches.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings

from mlx_kv.cache.codecs import find_codecs
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.eviction.observation import TAKEN_BACK
from mlx_kv.cache.eviction.scores import Score
from mlx_kv.cache.eviction.scores.tokens import ScoredTokens, Wants
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import Budget

HEADS, GROUP, DIM, SCALE = 2, 2, 32, 0.3
WINDOW = 5
EVERYTHING = Wants(queries=WINDOW, received=True, moments=True)


class Rotation:
    """Some RoPE: it turns pairs of neighbouring dimensions."""

    def __init__(self) -> None:
        self.speed = 0.5 ** mx.arange(DIM // 2)

    def turned(self, x: mx.array, positions: mx.array) -> mx.array:
        """(..., m, D) by positions (m,)."""
        angle = positions[:, None] * self.speed
        a, b = x[..., ::2], x[..., 1::2]
        one, other = a * mx.cos(angle) - b * mx.sin(angle), a * mx.sin(angle) + b * mx.cos(angle)
        return mx.stack([one, other], axis=-1).reshape(x.shape)

    def back(self, queries: mx.array, positions: Any) -> mx.array:
        lines = [
            self.turned(own, -(mx.arange(queries.shape[2]) + first))
            for own, first in zip(queries.astype(mx.float32), positions, strict=True)
        ]
        return mx.stack(lines)

    def ahead(self, position: int) -> mx.array:
        return self.turned(mx.eye(DIM), mx.full((DIM,), position)).T


class Call:
    """As a layer asks: over what the cache returned."""

    def __init__(self, queries: mx.array, keys: Any, sinks: mx.array | None = None) -> None:
        self.queries, self.keys, self.values, self.mask = queries, keys, None, None
        self.scale, self.sinks = SCALE, sinks

    def changed(self, **changes: Any) -> Call:
        raise AssertionError("nobody asked for another call")

    def forward(self, **changes: Any) -> mx.array:
        return mx.zeros(self.queries.shape)


@dataclass
class Known:
    """What the reference knows of one row."""

    tokens: list[np.ndarray] = field(default_factory=list)  # keys, (H, D), of every position
    queries: list[np.ndarray] = field(default_factory=list)  # (Hq, D)
    given: list[list[dict[int, float]]] = field(default_factory=list)  # by query and KV head: to each position
    newest: int = 0  # one past the last position that was written


class Watched:
    """A cache with a budget and random tokens, and beside it what the reference knows of its rows."""

    def __init__(
        self,
        share: Any,
        bits: int | None,
        keep_recent: int,
        sinks: bool,
        seed: int,
        wants: Wants,
        budget: int = 24,
    ) -> None:
        self.random, self.wants = np.random.default_rng(seed), wants
        self.scored_tokens: list[ScoredTokens] = []
        score = Score("watched", self._scored, wants=wants)
        layout = Budget(budget, keep_recent, 1, 8, 64)
        evictor = Evictor(layout, score, share)
        assert evictor.observation is not None
        evictor.observation.rope = Rotation()
        self.cache = KVCache(evictor=evictor, bits=bits, group_size=32)
        self.sinks = mx.array(self.random.normal(size=HEADS * GROUP).astype(np.float32)) if sinks else None
        self.rows = [Known()]
        self.codec = find_codecs(bits, 32)[0]

    def _scored(self, tokens: ScoredTokens) -> mx.array:
        return mx.sin(tokens.positions.astype(mx.float32) * 12.9898) + mx.zeros(tokens.keys.shape[:3])

    def stored(self, x: mx.array) -> np.ndarray:
        return np.array(self.codec.decode(self.codec.encode(x), mx.float32))

    def write(self, counts: list[int], longest: int, seen: bool = True) -> None:
        padded = any(count != longest for count in counts)
        if padded:
            self.cache.prepare(lengths=counts)
        shape = len(counts), HEADS, longest, DIM
        keys, queries = (
            self.random.normal(size=(shape[0], heads, *shape[2:])).astype(np.float32)
            for heads in (HEADS, HEADS * GROUP)
        )
        self.cache.make_mask(longest)
        read, _ = self.cache.update_and_fetch(mx.array(keys), mx.array(keys))
        stored = self.stored(mx.array(keys))
        for row, count in enumerate(counts):
            own = self.rows[row]
            first = len(own.tokens)
            own.tokens += [stored[row, :, i] for i in range(count)]
            own.newest = len(own.tokens)
            live = [set(line) - {-1} for line in np.array(self.cache.positions)[row].tolist()]
            for i in range(count):
                own.queries.append(queries[row, :, i])
                own.given.append(self._given(own, queries[row, :, i], live, first + i))
        if seen:
            mx.eval(self.cache.attend(Call(mx.array(queries), read, self.sinks)))
        if padded:
            self.cache.finalize()

    def _given(self, row: Known, query: np.ndarray, live: list[set[int]], position: int) -> list[dict[int, float]]:
        made = []
        for head in range(HEADS):
            seen = sorted(p for p in live[head if len(live) > 1 else 0] if p <= position)
            keys = np.stack([row.tokens[p][head] for p in seen])
            shares = np.zeros(len(seen))
            for asked in range(head * GROUP, (head + 1) * GROUP):
                weights = np.exp(SCALE * keys @ query[asked])
                more = 0.0 if self.sinks is None else float(np.exp(np.array(self.sinks)[asked]))
                shares += weights / (weights.sum() + more) / GROUP
            made.append(dict(zip(seen, shares.tolist(), strict=True)))
        return made

    def trim(self, counts: list[int]) -> None:
        counts = [
            min(count, self.cache.layout.most_trim(row))
            for count, row in zip(counts, self.cache.view.rows, strict=True)
        ]
        before = [list(self.observation.since), list(self.observation.ends)]
        self.cache.trim_per_sequence(counts)
        for row, count in enumerate(counts):
            own = self.rows[row]
            left = len(own.tokens) - count
            for line in (own.tokens, own.queries, own.given):
                del line[left:]
            followed = own.newest - left <= max(self.cache.layout.keep_recent, TAKEN_BACK)
            if before[1][row] == left + count and followed:
                assert self.observation.since[row] == min(before[0][row], left), "it is followed so far back"

    @property
    def observation(self) -> Any:
        assert self.cache.evictor is not None
        return self.cache.evictor.observation

    def check(self) -> None:
        evictor = self.cache.evictor
        assert evictor is not None
        asked: list[ScoredTokens] = []
        own = evictor.score
        evictor.score = Score("asking", lambda tokens: (asked.append(tokens), self._scored(tokens))[1], wants=own.wants)
        for row, known in enumerate(self.rows):
            if not known.tokens:
                continue
            asked.clear()
            evictor.live_scores(row)
            (tokens,) = asked
            index = row if tokens.keys.shape[0] > 1 else 0
            self._check_row(row, index, known, tokens)
        evictor.score = own

    def _check_row(self, row: int, index: int, known: Known, tokens: ScoredTokens) -> None:
        since, end = (line[row] for line in (self.observation.since, self.observation.ends))
        seen = range(since, end)
        assert end <= len(known.tokens)
        if not seen:
            assert tokens.queries is None
            assert tokens.received is None
            assert tokens.moments is None
            return
        last = [p for p in seen if p >= end - self.observation.recent.counts[row]][-WINDOW:]
        if self.wants.queries and last:
            assert tokens.queries is not None
            assert tokens.query_positions is not None
            assert tokens.query_positions[index].tolist() == last
            close(tokens.queries[index], np.stack([known.queries[p] for p in last], axis=1))
        if self.wants.received:
            assert tokens.received is not None
            assert tokens.observers is not None
            positions = np.array(mx.broadcast_to(tokens.positions[index], tokens.received.shape[1:]))
            received = np.array(
                [
                    [sum(known.given[q][head].get(p, 0.0) for q in seen) for p in line]
                    for head, line in enumerate(positions.tolist())
                ]
            )
            close(tokens.received[index], received)
            observers = np.array([[sum(q >= p for q in seen) for p in line] for line in positions.tolist()])
            shown = np.array(mx.broadcast_to(tokens.observers[index], tokens.received.shape[1:]))
            assert np.array_equal(shown, np.maximum(observers, 1))
        if self.wants.moments:
            counted = [p for p in seen if p >= 4]
            if not counted:
                assert tokens.moments is None
                return
            assert tokens.moments is not None
            turned = np.stack(
                [
                    np.array(Rotation().turned(mx.array(known.queries[p])[:, None], mx.array([-p])))[:, 0]
                    for p in counted
                ]
            )  # (m, Hq, D)
            off = turned - turned.mean(axis=0)
            close(tokens.moments.mean[index], turned.mean(axis=0))
            close(tokens.moments.covariance[index], np.einsum("mhd,mhe->hde", off, off) / len(counted))


def close(got: mx.array, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(got), wanted, rtol=1e-3, atol=2e-4)


def grown(watched: Watched, rows: int) -> None:
    """More rows, each of them the first one's copy."""
    watched.cache = KVCache.merge([watched.cache] * rows)
    watched.rows = [copy.deepcopy(watched.rows[i % len(watched.rows)]) for i in range(rows * len(watched.rows))]


STEP = st.one_of(
    st.tuples(st.just("write"), st.lists(st.integers(0, 40), min_size=3, max_size=3)),
    st.tuples(st.just("decode"), st.integers(1, 40)),
    st.tuples(st.just("draft"), st.lists(st.integers(0, 4), min_size=3, max_size=3)),
    st.tuples(st.just("trim"), st.lists(st.integers(0, 90), min_size=3, max_size=3)),
    st.tuples(st.just("unseen"), st.integers(1, 5)),
    st.tuples(st.just("compact"), st.none()),
    st.tuples(st.just("copy"), st.none()),
    st.tuples(st.just("state"), st.none()),
    st.tuples(st.just("merge"), st.none()),
    st.tuples(st.just("filter"), st.integers(0, 2)),
    st.tuples(st.just("check"), st.none()),
)


def apply(watched: Watched, what: str, how: Any) -> None:
    rows = len(watched.rows)
    if what == "write":
        counts = [max(1, count) if i == 0 else count for i, count in enumerate(how[:rows])]
        watched.write(counts, max(counts))
    elif what in ("decode", "unseen"):
        for _ in range(how):
            watched.write([1] * rows, 1, seen=what == "decode")
    elif what == "draft":
        watched.write([5] * rows, 5)
        watched.trim(how[:rows])
    elif what == "trim":
        watched.trim(how[:rows])
    elif what == "compact":
        watched.cache.compact()
    elif what == "copy":
        watched.cache = copy.deepcopy(watched.cache)
    elif what == "state":
        evictor = watched.cache.evictor
        assert evictor is not None
        before, turning = evictor.score, evictor.observation.rope if evictor.observation else None
        watched.cache.compact()
        told = evictor.state
        again = Evictor.from_state(evictor.layout, told, before)
        assert again.observation is not None
        again.observation.rope = turning
        again.belong_to(watched.cache)
        watched.cache.evictor = again
    elif what == "merge" and rows == 1:
        grown(watched, 3)
    elif what == "filter" and rows > 1:
        chosen = [how, (how + 1) % rows][: 1 + how % 2]
        watched.cache.filter(chosen)
        watched.rows = [watched.rows[row] for row in chosen]
    elif what == "check":
        watched.check()


@pytest.mark.parametrize(
    "wants",
    [EVERYTHING, Wants(queries=WINDOW), Wants(received=True), Wants(moments=True)],
    ids=["everything", "queries", "received", "moments"],
)
@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(STEP, min_size=3, max_size=14),
    share=st.sampled_from(["layer", "head"]),
    bits=st.sampled_from([None, 8]),
    keep_recent=st.sampled_from([0, 3, 9]),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_what_a_reference_knows_that_keeps_everything(
    wants: Wants, steps: list[Any], share: Any, bits: int | None, keep_recent: int, sinks: bool, seed: int
) -> None:
    watched = Watched(share, bits, keep_recent, sinks, seed, wants)
    watched.write([20], 20)
    for what, how in steps:
        apply(watched, what, how)
    watched.check()


@pytest.mark.parametrize("keep_recent", [0, TAKEN_BACK + 6])
def test_as_much_as_a_trim_may_take_back_is_followed_and_one_more_is_not(keep_recent: int) -> None:
    most = max(keep_recent, TAKEN_BACK)
    watched = Watched("layer", None, keep_recent, sinks=False, seed=0, wants=EVERYTHING, budget=400)
    watched.write([200], 200)
    watched.trim([most])
    watched.check()
    assert len(watched.observation.last_queries(None).positions[0].tolist()) == WINDOW
    watched.trim([WINDOW])
    watched.check()
    assert watched.observation.since == [0]  # all that was held is gone, and what was summed up is exact still
    watched.trim([1])
    watched.check()
    assert watched.observation.since == [200 - most - WINDOW - 1]
    watched.write([30], 30)
    watched.check()


def test_rows_that_stand_alike_and_were_not_seen_alike_are_scored_one_by_one() -> None:
    """In a compaction, which scores rows together where it can."""
    watched, unseen = (Watched("layer", None, 3, sinks=False, seed=seed, wants=EVERYTHING) for seed in range(2))
    watched.write([30], 30)
    assert watched.cache.evictor is not None
    assert unseen.cache.evictor is not None
    unseen.cache.evictor.score = watched.cache.evictor.score
    unseen.write([30], 30, seen=False)
    watched.cache, watched.rows = KVCache.merge([watched.cache, unseen.cache]), [*watched.rows, *unseen.rows]
    watched.write([1, 1], 1)
    assert watched.cache.view.rows[0] == watched.cache.view.rows[1]
    assert watched.observation.since == [0, 30]
    evictor = watched.cache.evictor
    assert evictor is not None
    asking = lambda tokens: (watched.scored_tokens.append(tokens), watched._scored(tokens))[1]  # noqa: E731
    evictor.score = Score("asking", asking, wants=EVERYTHING)
    watched.cache.compact()
    assert watched.cache.size() == 24
    for row, known in enumerate(watched.rows):
        tokens = watched.scored_tokens[min(row, len(watched.scored_tokens) - 1)]
        watched._check_row(row, row if tokens.keys.shape[0] > 1 else 0, known, tokens)
