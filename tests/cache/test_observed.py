"""The last queries that are observed stay those of a slow reference that keeps every query.

Of trims, rows and evictions the reference knows only which tokens are there. A property: any order of writes, padding,
trims, compactions, copies and batches.
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

from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.eviction.scores import Score, ScoredTokens, Wants
from mlx_kv.cache.eviction.scoring import MIN_TRIM
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import Budget

HEADS, GROUP, DIM, SCALE = 2, 2, 32, 0.3
WINDOW = 5
WANTS = Wants(queries=WINDOW)


class Call:
    """As a layer asks: over what the cache returned."""

    def __init__(self, queries: mx.array, keys: Any, sinks: mx.array | None = None) -> None:
        self.queries, self.keys, self.values, self.mask = queries, keys, None, None
        self.scale, self.sinks = SCALE, sinks

    def changed(self, **changes: Any) -> Call:
        return self  # with the mask of heads of different lengths

    def forward(self, **changes: Any) -> mx.array:
        return mx.zeros(self.queries.shape)


@dataclass
class Known:
    """What the reference knows of one row."""

    queries: list[np.ndarray] = field(default_factory=list)  # (Hq, D), of every position
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
        budget: int = 24,
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.scored_tokens: list[ScoredTokens] = []
        score = Score("watched", self._scored, wants=WANTS)
        layout = Budget(budget, keep_recent, 1, 8, 64)
        evictor = Evictor(layout, score, share)
        self.cache = KVCache(evictor=evictor, bits=bits, group_size=32)
        self.sinks = mx.array(self.random.normal(size=HEADS * GROUP).astype(np.float32)) if sinks else None
        self.rows = [Known()]

    def _scored(self, tokens: ScoredTokens) -> mx.array:
        return tokens.keys.astype(mx.float32).sum(axis=-1)  # another one in each head

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
        for row, count in enumerate(counts):
            self.rows[row].queries += [queries[row, :, i] for i in range(count)]
            self.rows[row].newest = len(self.rows[row].queries)
        if seen:
            mx.eval(self.cache.attend(Call(mx.array(queries), read, self.sinks)))
        if padded:
            self.cache.finalize()

    def trim(self, counts: list[int]) -> None:
        counts = [
            min(count, self.cache.layout.max_trim(row)) for count, row in zip(counts, self.cache.view.rows, strict=True)
        ]
        ends, held = list(self.observation.ends), self.observation.recent.counts
        self.cache.trim_per_sequence(counts)
        for row, count in enumerate(counts):
            own = self.rows[row]
            left = len(own.queries) - count
            del own.queries[left:]
            followed = own.newest - left <= max(self.cache.layout.keep_recent, MIN_TRIM)
            if ends[row] == left + count and followed:
                assert self.observation.recent.counts[row] == max(0, held[row] - count), "it is followed so far back"

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
            if not known.queries:
                continue
            asked.clear()
            evictor.live_scores(row)
            for head, tokens in enumerate(asked):  # one by one where they hold different numbers of tokens
                heads = slice(GROUP * head, GROUP * (head + 1)) if len(asked) == HEADS else slice(None)
                self._check_row(row, row if tokens.keys.shape[0] > 1 else 0, heads, known, tokens)
        evictor.score = own

    def _check_row(self, row: int, index: int, heads: slice, known: Known, tokens: ScoredTokens) -> None:
        end, held = self.observation.ends[row], self.observation.recent.counts[row]
        assert end <= len(known.queries)
        last = [*range(end - held, end)][-WINDOW:]
        if not last:
            assert tokens.queries is None
            return
        assert tokens.queries is not None
        assert tokens.query_positions is not None
        assert tokens.query_positions[index].tolist() == last
        close(tokens.queries[index], np.stack([known.queries[p][heads] for p in last], axis=1))


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
        before = evictor.score
        watched.cache.compact()
        told = evictor.state
        again = Evictor.from_state(evictor.layout, told, before)
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


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(STEP, min_size=3, max_size=14),
    share=st.sampled_from(["layer", "head", "adaptive"]),
    bits=st.sampled_from([None, 8]),
    keep_recent=st.sampled_from([0, 3, 9]),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_what_a_reference_knows_that_keeps_everything(
    steps: list[Any], share: Any, bits: int | None, keep_recent: int, sinks: bool, seed: int
) -> None:
    watched = Watched(share, bits, keep_recent, sinks, seed)
    watched.write([20], 20)
    for what, how in steps:
        if what != "unseen" or share != "adaptive":  # which needs a request for each mask
            apply(watched, what, how % len(watched.rows) if what == "filter" else how)
    watched.check()


@pytest.mark.parametrize("keep_recent", [0, MIN_TRIM + 6])
def test_as_much_as_a_trim_may_take_back_is_followed_and_one_more_is_not(keep_recent: int) -> None:
    most = max(keep_recent, MIN_TRIM)
    watched = Watched("layer", None, keep_recent, sinks=False, seed=0, budget=400)
    watched.write([200], 200)
    watched.trim([most])
    watched.check()
    assert len(watched.observation.last_queries(None).positions[0].tolist()) == WINDOW
    watched.trim([WINDOW])
    watched.check()
    assert watched.observation.recent.counts == [0]
    watched.trim([1])
    watched.check()
    assert watched.observation.ends == [200 - most - WINDOW - 1]
    watched.write([30], 30)
    watched.check()


def test_rows_that_stand_alike_and_were_not_seen_alike_are_scored_one_by_one() -> None:
    """In a compaction, which scores rows together where it can."""
    watched, unseen = (Watched("layer", None, 3, sinks=False, seed=seed) for seed in range(2))
    watched.write([30], 30)
    assert watched.cache.evictor is not None
    assert unseen.cache.evictor is not None
    unseen.cache.evictor.score = watched.cache.evictor.score
    unseen.write([30], 30, seen=False)
    watched.cache, watched.rows = KVCache.merge([watched.cache, unseen.cache]), [*watched.rows, *unseen.rows]
    watched.write([1, 1], 1)
    assert watched.cache.view.rows[0] == watched.cache.view.rows[1]
    assert watched.observation.recent.counts == [31, 1]
    evictor = watched.cache.evictor
    assert evictor is not None
    asking = lambda tokens: (watched.scored_tokens.append(tokens), watched._scored(tokens))[1]  # noqa: E731
    evictor.score = Score("asking", asking)
    watched.cache.compact()
    assert watched.cache.size() == 24
    for row, known in enumerate(watched.rows):
        tokens = watched.scored_tokens[min(row, len(watched.scored_tokens) - 1)]
        watched._check_row(row, row if tokens.keys.shape[0] > 1 else 0, slice(None), known, tokens)
