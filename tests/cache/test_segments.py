"""Rows that share first tokens: whatever happens to a batch, each row is what it would be alone."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from classes import anywhere, attend
from effort import HISTORIES
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from oracle import HEADS, QUERY_HEADS
from test_batch_rows import DIM, MOST_BATCHES, Batches, Kind, Single, kinds

from mlx_kv import CachePolicy, KVCache
from mlx_kv.cache import attention, row_classes, segmented
from mlx_kv.cache.segmented import SegmentedCache
from mlx_kv.cache.segments import Chain, can_share, read_from, segment_of, sharable

RULE, MIN_SAVING, ON_CPU = row_classes.assign_classes, row_classes.min_saving, attention.on_cpu
MAX_JOINED = segmented.MAX_JOINED
CUTS = st.lists(st.floats(0, 1), min_size=1, max_size=3)


class SharingBatches(Batches):
    """The same histories, of batches whose rows fork and share what they have read."""

    def made(self, cache: KVCache) -> Any:
        return SegmentedCache(cache)

    @initialize(
        kind=kinds(["full", "full", "layers", "layer", "head", "ring"]),
        rows=st.integers(1, 4),
        seed=st.integers(0, 999),
        period=st.sampled_from([1, 2, 3, 32]),
        tokens=st.integers(1, 20),
        cuts=CUTS,
        more=st.integers(0, 2),
    )
    def begin(self, kind: Kind, rows: int, seed: int, period: int, tokens: int, cuts: list[float], more: int) -> None:
        row_classes.assign_classes = anywhere(seed)  # type: ignore[assignment]
        row_classes.min_saving = lambda: seed % 30
        attention.on_cpu = segmented.on_cpu = lambda: seed % 2 == 0  # partial results, or one softmax as on a GPU
        segmented.MAX_JOINED = seed % 3 * 8  # queries of several segments at once, or one after the other
        super().begin(kind, 1, seed, period)
        first = self.batches[0]
        self._feed(first, tokens, [tokens])
        if self._fork(first, 0, rows, cuts, more):
            self.batches.remove(first)

    @precondition(lambda self: len(self.batches) < MOST_BATCHES)
    @rule(which=st.floats(0, 1), row=st.floats(0, 1), copies=st.integers(1, 3), cuts=CUTS, more=st.integers(0, 2))
    def fork(self, which: float, row: float, copies: int, cuts: list[float], more: int) -> None:
        batch = self._pick(which)
        self._fork(batch, int(row * len(batch[1])) % len(batch[1]), copies, cuts, more)

    def _fork(
        self, batch: tuple[list[Any], list[Single]], index: int, copies: int, cuts: list[float], more: int
    ) -> bool:
        """A batch of copies of one row whose first tokens are segments, of which they may use only a beginning."""
        caches, singles = batch
        tails = [cache.extract(index) for cache in caches]
        if not all(map(can_share, tails)):
            return False
        length = min(sharable(tail.view, tail.view.rows[0]) for tail in tails)
        chains: list[Chain] = [() for _ in tails]
        done = 0
        for end in sorted({int(share * length) for share in cuts} - {0}):
            for layer, tail in enumerate(tails):
                longer = segment_of(tail, 0, min(end - done + more, length - done))
                chains[layer] = (*chains[layer], (longer, end - done))
                read_from(chains[layer], tail, end)
            done = end
        for tail, chain in zip(tails, chains, strict=True):
            tail.view.chain = chain
        each = [copy.deepcopy(tails) for _ in range(copies)]  # sequences of their own
        layers = [list(map(SegmentedCache, same)) for same in zip(*each, strict=True)]
        rows = [singles[index].copied() for _ in range(copies)]
        self.batches.append(([same[0].merge(same) for same in layers], rows))
        return True

    @rule(which=st.floats(0, 1))
    def bytes_count_once(self, which: float) -> None:
        caches, _ = self._pick(which)
        for cache in caches:
            assert len(set(cache.segments)) == len(cache.segments)
            tails = sum(part.nbytes for part in cache.parts)
            assert cache.nbytes == tails + sum(part.nbytes for part in cache.segments)

    def teardown(self) -> None:
        row_classes.assign_classes, row_classes.min_saving = RULE, MIN_SAVING
        attention.on_cpu = segmented.on_cpu = ON_CPU
        segmented.MAX_JOINED = MAX_JOINED
        super().teardown()


SharingBatches.TestCase.settings = settings(
    max_examples=HISTORIES,
    stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
)
TestSharingBatches = pytest.mark.slow(SharingBatches.TestCase)


def shared_pair(policy: CachePolicy, tokens: int, monkeypatch: pytest.MonkeyPatch) -> tuple[SegmentedCache, KVCache]:
    """Two rows that share all that they may of so many tokens, and one of them alone."""
    monkeypatch.setattr(row_classes, "min_saving", lambda: 1)
    alone = policy.make_cache(policy.layout(None))
    alone.carry(object())
    alone.update_and_fetch(*(mx.random.normal((1, HEADS, tokens, DIM)) for _ in range(2)))
    rows, segment = [copy.deepcopy(alone) for _ in range(2)], segment_of(alone, 0, tokens)
    for row in rows:
        row.view.chain = ((segment, tokens),)
    return SegmentedCache.merge([SegmentedCache(row) for row in rows]), alone


@pytest.mark.parametrize("back", [2, 9])
def test_a_trim_to_where_shared_tokens_are_seen_in_full_precision(back: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest tokens of a row are its own, also after a trim."""
    length = 8
    batch, alone = shared_pair(CachePolicy(bits=4, group_size=32, residual_length=length), 40, monkeypatch)
    assert [cache.view.rows[row].shared for cache, row in batch.places] == [33, 33]
    for new, drop in ((3, 0), (1, back), (1, 0), (2, 0)):
        q, k, v = (mx.random.normal((1, heads, new, DIM)) for heads in (QUERY_HEADS, HEADS, HEADS))
        got = attend(batch, *(mx.concatenate([x, x]) for x in (q, k, v)))
        wanted = attend(alone, q, k, v)
        assert mx.allclose(got[1], wanted[0], atol=1e-5)
        alone.trim(drop)
        batch.trim_per_sequence([drop, drop])
        seen = batch.places[0][0].view.rows[0]
        assert seen.shared <= seen.offset - length + 1
