"""Rows of a batch: whatever happens to it, each row is what it would be alone, fed with its accepted tokens only."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from classes import attend
from effort import HISTORIES
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from oracle import HEADS, QUERY_HEADS, poison, set_room

import mlx_kv.cache.kv_cache
import mlx_kv.cache.rows
from mlx_kv import CachePolicy, KVCache
from mlx_kv.cache.eviction.evictor import LayerGroup
from mlx_kv.cache.eviction.slot_tokens import SlotTokens
from mlx_kv.cache.layout import Row, WriteCapacity
from mlx_kv.cache.plan import Plan
from mlx_kv.cache.residual import ROOM
from mlx_kv.generation.prefill import announce
from mlx_kv.mlxlm.traverse import attention_caches, compact, places_of

DIM, PERIOD = 32, WriteCapacity.PERIOD
MOST_ROWS, MOST_BATCHES = 5, 3
Tokens = tuple[np.ndarray, np.ndarray, np.ndarray]  # q (QH, n, D), k (H, n, D), v (H, n, D)


@dataclass(frozen=True)
class Kind:
    """What kind of cache, in how many layers."""

    policy: CachePolicy
    window: int | None = None
    chunk: int | None = None
    layers: int = 1
    carries: bool = False
    room: int = ROOM  # beside newest tokens as they came

    def make(self) -> list[KVCache]:
        made = self._made(self.policy)
        for cache in made if self.policy.residual_length else []:
            set_room(cache, self.room)
        return made

    def alone(self) -> list[KVCache]:
        """As `make`, but always with all the room: it can take back whatever a batch can."""
        return self._made(self.policy if self.layers > 1 else replace(self.policy, max_rollback=self.policy.max_write))

    def _made(self, policy: CachePolicy) -> list[KVCache]:
        layer_group = LayerGroup()
        layout = policy.layout(self.window, sinks=2 if self.window else 0, chunk_size=self.chunk)
        made = [policy.make_cache(layout, layer_group=layer_group, layer=i) for i in range(self.layers)]
        for cache in made if self.carries else []:
            cache.carry(object())
        return made


BOUNDS = ("full", "ring", "chunks", "layers", "layer", "head")


def kinds(bounds: Sequence[str] = BOUNDS) -> st.SearchStrategy[Kind]:
    apart: list[dict[str, Any]] = [
        {"bits": (8, 4), "group_size": 32},
        {"bits": 4, "group_size": 32, "codec": ("rotated", "affine")},
        {"codec": "mxfp8"},
        {"bits": 4, "group_size": 32, "residual_length": 3},
    ]
    storage = st.sampled_from([*[{}] * 3, *[{"bits": bits, "group_size": 32} for bits in (8, 8, 4, 4)], *apart])

    def made(storage: dict[str, Any], bound: str, score: str, rollback: int, carries: bool) -> Kind:
        if bound in ("layers", "layer", "head"):
            policy = CachePolicy(budget=12, keep_recent=4, sinks=2, margin=3, share=bound, score=score, **storage)
            return Kind(policy, layers=2, carries=carries)
        policy = CachePolicy(max_write=5, max_rollback=rollback, **storage)
        window, chunk = 9 if bound == "ring" else None, 6 if bound == "chunks" else None
        return Kind(policy, window, chunk, carries=carries)

    scores = st.sampled_from(["key_norm", "key_diff", "random"])
    return st.builds(made, storage, st.sampled_from(bounds), scores, st.integers(0, 5), st.booleans())


@dataclass
class Single:
    """One sequence alone: its caches, one a layer, and the tokens of its last update, which may still be taken back."""

    caches: list[KVCache]
    pending: list[Tokens] = field(default_factory=list)  # by layer

    def flush(self) -> None:
        for cache, (_, k, v) in zip(self.caches, self.pending, strict=False):
            if k.shape[1]:
                cache.update_and_fetch(mx.array(k)[None], mx.array(v)[None])
        self.pending = []

    def touch(self) -> None:
        """What any update begins with, also one that has no token for this row: a compaction, if it is due."""
        for cache in self.caches:
            if cache.evictor is not None:
                cache.rows = cache.evictor.compact_if_due(cache.rows)

    def trim(self, count: int) -> None:
        held = self.pending[0][1].shape[1] if self.pending else 0
        if count < held:
            self.pending = [tuple(x[:, : held - count] for x in tokens) for tokens in self.pending]
            return
        self.flush()  # the update took place, and with it a compaction if one was due
        for cache in self.caches:
            cache.trim(count)

    @property
    def length(self) -> int:
        return self.caches[0].offset + (self.pending[0][1].shape[1] if self.pending else 0)

    def copied(self) -> Single:
        return Single(copy.deepcopy(self.caches), list(self.pending))


def attention(cache: Any, *tokens: mx.array) -> np.ndarray:
    return np.array(attend(cache, *tokens))


def rows_of(cache: Any) -> list[Row]:
    """Where each row of a batch stands."""
    return [own.view.rows[index] for own, index in places_of(cache)]


def most_trims(cache: Any) -> list[int]:
    """Tokens that each row can take back."""
    return [own.most_trims[index] for own, index in places_of(cache)]


class Batches(RuleBasedStateMachine):
    """Batches that trade rows, beside each row alone."""

    only: Kind | None = None  # not any kind, but this one

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[list[Any], list[Single]]] = []

    def made(self, cache: KVCache) -> Any:
        """What stands in a batch for the cache of one row."""
        return cache

    def teardown(self) -> None:
        WriteCapacity.PERIOD = PERIOD

    @initialize(kind=kinds(), rows=st.integers(1, 3), seed=st.integers(0, 999), period=st.sampled_from([1, 2, 3, 32]))
    def begin(self, kind: Kind, rows: int, seed: int, period: int) -> None:
        WriteCapacity.PERIOD = period
        self.kind, self.rng = self.only or kind, np.random.default_rng(seed)
        self.batches.append(self._new(rows))

    def _new(self, rows: int) -> tuple[list[Any], list[Single]]:
        each = [self.kind.make() for _ in range(rows)]
        layers = [[self.made(caches[layer]) for caches in each] for layer in range(self.kind.layers)]
        merged = [same[0].merge(same) for same in layers]
        return merged, [Single(self.kind.alone()) for _ in range(rows)]

    def _pick(self, which: float) -> tuple[list[Any], list[Single]]:
        return self.batches[int(which * len(self.batches)) % len(self.batches)]

    def _feed(self, batch: tuple[list[Any], list[Single]], new: int, counts: list[int]) -> None:
        """One update of all layers; the first counts[i] tokens of row i are its own."""
        caches, singles = batch
        for single in singles:
            single.flush()
            single.touch()
        tokens = []
        for _ in caches:
            shapes = [(len(singles), heads, new, DIM) for heads in (QUERY_HEADS, HEADS, HEADS)]
            q, k, v = (self.rng.normal(size=shape).astype(np.float32) for shape in shapes)
            tokens.append((q, k, v))
        announce(caches, counts)
        twins = copy.deepcopy(caches)
        for twin in attention_caches(twins):
            poison(twin)
        outputs = [attention(cache, *map(mx.array, x)) for cache, x in zip(caches, tokens, strict=True)]
        others = [attention(cache, *map(mx.array, x)) for cache, x in zip(twins, tokens, strict=True)]
        for row, (single, count) in enumerate(zip(singles, counts, strict=True)):
            own = [tuple(x[row, :, :count] for x in of_layer) for of_layer in tokens]
            probe = single.copied().caches
            for layer, (q, k, v) in enumerate(own):
                got = outputs[layer][row, :, :count]
                assert np.isfinite(outputs[layer][row]).all()
                assert np.array_equal(got, others[layer][row, :, :count]), "a dead slot changed the output"
                if count:
                    wanted = attention(probe[layer], *(mx.array(x)[None] for x in (q, k, v)))[0]
                    np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=2e-5)
            single.pending = own

    @rule(which=st.floats(0, 1), new=st.one_of(st.just(1), st.integers(1, 8)))
    def update(self, which: float, new: int) -> None:
        batch = self._pick(which)
        self._feed(batch, new, [new] * len(batch[1]))

    @rule(which=st.floats(0, 1), lengths=st.lists(st.integers(0, 11), min_size=5, max_size=5), chunk=st.integers(1, 11))
    def prefill(self, which: float, lengths: list[int], chunk: int) -> None:
        """Right-padded prompts in chunks, as mlx-lm's batches read them."""
        batch = self._pick(which)
        caches, singles = batch
        lengths = lengths[: len(singles)]
        longest = max(lengths)
        for cache in caches:
            cache.prepare(lengths=lengths, right_padding=[longest - length for length in lengths])
        for first in range(0, longest, chunk):
            new = min(chunk, longest - first)
            self._feed(batch, new, [max(0, min(new, length - first)) for length in lengths])
        for cache in caches:
            cache.finalize()

    @rule(which=st.floats(0, 1), fractions=st.lists(st.floats(0, 1), min_size=5, max_size=5), uniform=st.booleans())
    def trim(self, which: float, fractions: list[float], uniform: bool) -> None:
        caches, singles = self._pick(which)
        most = most_trims(caches[0])
        counts = [min(int(f * 9), m) for f, m in zip(fractions, most, strict=False)]
        if uniform:
            counts = [min(counts)] * len(counts)
        for i, cache in enumerate(caches):
            if uniform and cache.can_trim(counts[0]):
                assert cache.trim(counts[0]) == counts[0]
            else:
                cache.trim_per_sequence(mx.array(counts) if i else counts)
        for single, count in zip(singles, counts, strict=True):
            single.trim(count)

    @rule(which=st.floats(0, 1), row=st.floats(0, 1))
    def trim_too_far(self, which: float, row: float) -> None:
        """One row that cannot: nothing happens in any."""
        caches, singles = self._pick(which)
        index = int(row * len(singles)) % len(singles)
        counts = [0 if i != index else most + 1 for i, most in enumerate(most_trims(caches[0]))]
        before = rows_of(caches[0])
        with pytest.raises(ValueError, match="cannot trim"):
            caches[0].trim_per_sequence(counts)
        assert rows_of(caches[0]) == before

    @precondition(lambda self: len(self.batches) > 1)
    @rule(extend=st.booleans())
    def join(self, extend: bool) -> None:
        (left, a), (right, b) = self.batches.pop(), self.batches.pop()
        if len(a) + len(b) > MOST_ROWS:
            b = b[: MOST_ROWS - len(a)]
            if not b:
                self.batches.append((left, a))
                return
            for cache in right:
                cache.filter(list(range(len(b))))
        if extend:
            for own, other in zip(left, right, strict=True):
                own.extend(other)
        else:
            left = [own.merge([own, other]) for own, other in zip(left, right, strict=True)]
        self.batches.append((left, a + b))

    @precondition(lambda self: len(self.batches) < MOST_BATCHES)
    @rule(rows=st.integers(1, 2))
    def another(self, rows: int) -> None:
        self.batches.append(self._new(rows))

    @rule(which=st.floats(0, 1), order=st.permutations(range(MOST_ROWS)), keep=st.integers(1, MOST_ROWS))
    def filter(self, which: float, order: list[int], keep: int) -> None:
        caches, singles = self._pick(which)
        chosen = [row for row in order if row < len(singles)][:keep]
        for cache in caches:
            cache.filter(chosen)
        singles[:] = [singles[row] for row in chosen]

    @precondition(lambda self: len(self.batches) < MOST_BATCHES)
    @rule(which=st.floats(0, 1), row=st.floats(0, 1))
    def extract(self, which: float, row: float) -> None:
        """A row goes on twice: in its batch, and alone."""
        caches, singles = self._pick(which)
        index = int(row * len(singles)) % len(singles)
        extracted = [cache.extract(index) for cache in caches]
        assert all(cache.capacity <= 256 for cache in extracted)
        self.batches.append(([self.made(cache) for cache in extracted], [singles[index].copied()]))

    @rule(which=st.floats(0, 1), row=st.floats(0, 1), layers=st.lists(st.integers(0, 1), max_size=3))
    def look(self, which: float, row: float, layers: list[int]) -> None:
        """Copies of single layers, which may be kept, are no part of a copy that comes later."""
        caches, singles = self._pick(which)
        index = int(row * len(singles)) % len(singles)
        self.seen = [caches[layer].extract(index) for layer in layers if layer < len(caches)]

    @rule(which=st.floats(0, 1))
    def compact(self, which: float) -> None:
        caches, singles = self._pick(which)
        for single in singles:
            single.flush()
            for cache in single.caches:
                cache.compact()
        compact(caches)

    @rule(which=st.floats(0, 1), load=st.booleans())
    def replace(self, which: float, load: bool) -> None:
        caches, _ = self._pick(which)
        single = load and isinstance(caches[0], KVCache)
        new = [KVCache.from_state(cache.state) for cache in caches] if single else copy.deepcopy(caches)
        caches[:] = new

    @invariant()
    def rows_stand_where_they_would_alone(self) -> None:
        for caches, singles in self.batches:
            for cache in caches:
                offset = cache.offset
                known = [offset] * len(singles) if isinstance(offset, int) else offset.tolist()
                assert known == [single.length for single in singles]
                assert cache.nbytes_live <= cache.nbytes
            if len(caches) < 2 or any(single.pending for single in singles):
                continue
            for layer, cache in enumerate(caches):
                for (own, row), single in zip(places_of(cache), singles, strict=True):
                    alone = single.caches[layer].positions[0].tolist()
                    shared = list(range(own.view.rows[row].shared))  # in segments
                    got = [[*shared, *(p for p in head if p >= 0)] for head in own.positions[row].tolist()]
                    assert [got[0]] * len(alone) == alone if len(got) < len(alone) else got[: len(alone)] == alone


Batches.TestCase.settings = settings(
    max_examples=HISTORIES,
    stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
)
TestBatches = pytest.mark.slow(Batches.TestCase)


# --- the machine above must be able to fail: bugs planted one at a time ---------------------------------------------


def padding_is_stored(self: Plan, index: int, token: int) -> bool:
    return False


def mixes_up_rows(self: SlotTokens, chosen: Any) -> SlotTokens:
    return genuine_of_rows(self, chosen[::-1])


def loses_a_slot(*joined: Any) -> Any:
    buffers = genuine_join(*joined)
    for buffer in buffers:
        buffer.planes = tuple(mx.concatenate([p[:, :, 1:], p[:, :, :1]], axis=2) for p in buffer.planes)
    return buffers


def trims_all_rows_alike(layout: Any, rows: Any, counts: Any) -> Any:
    return genuine_trim(layout, rows, (min(counts),) * len(counts))


genuine_of_rows, genuine_join, genuine_trim = (
    SlotTokens.of_rows,
    mlx_kv.cache.rows.joined_buffers,
    mlx_kv.cache.kv_cache.trim_rows,
)
RING = Kind(CachePolicy(max_write=5), window=9)
# A small budget: rows soon hold tokens of different positions.
BUDGET = Kind(CachePolicy(budget=6, keep_recent=2, sinks=1, margin=1, score="key_norm"), layers=2)
PLANTED = {
    "padding is stored": (Plan, "is_padding", padding_is_stored, RING),
    "positions go to other rows": (SlotTokens, "of_rows", mixes_up_rows, BUDGET),
    "slots shift when rows join": (mlx_kv.cache.rows, "joined_buffers", loses_a_slot, RING),
    "rows trim together": (mlx_kv.cache.kv_cache, "trim_rows", trims_all_rows_alike, RING),
}
passed_without_bugs: list[Kind] = []


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken, kind = PLANTED[bug]
    monkeypatch.setattr(Batches, "only", kind)
    quick = settings(max_examples=40, stateful_step_count=25, phases=[Phase.generate], report_multiple_bugs=False)
    if kind not in passed_without_bugs:
        run_state_machine_as_test(Batches, settings=quick)
        passed_without_bugs.append(kind)
    monkeypatch.setattr(where, name, broken)
    # What is drawn depends on the constants of the whole package: a bug may take more histories, and ends them.
    with pytest.raises(BaseException):  # noqa: B017, PT011, the first rule that sees it fails in its own way
        run_state_machine_as_test(Batches, settings=settings(quick, max_examples=400))
