"""Rows of batches whose budget looks at attention, however their tokens are stored: each is what it would be alone.

A row alone is fed with its accepted tokens only, and never sees what drafts, padding or other rows asked. Both get the
same keys, values and queries. (Those of a model differ in their last bits between a batch and a row alone; where such a
number lies between two codes, other codes are stored, and from then on scores differ by as much as codes do.)
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from effort import THOROUGH
from oracle import HEADS, QUERY_HEADS
from test_batch_rows import DIM, MOST_ROWS, Batches, Kind, Single, attention, most_trims

from mlx_kv import CachePolicy, KVCache
from mlx_kv.cache.codecs import Affine, Centre, Centred, Microscaled
from mlx_kv.cache.eviction import scoring
from mlx_kv.cache.eviction.evictor import RowMetadata
from mlx_kv.cache.eviction.scores import Wants, register_score, snap_kv
from mlx_kv.cache.eviction.scoring import MIN_TRIM, Observation, RecentQueries
from mlx_kv.cache.layout import WriteCapacity
from mlx_kv.mlxlm.traverse import places_of

CENTRE = Centre.of(mx.random.normal((1, HEADS, 8, DIM), key=mx.random.key(1)))
STORED: dict[str, dict[str, Any]] = {
    "mxfp8": {"codec": "mxfp8"},
    "mxfp4": {"codec": "mxfp4"},
    "nvfp4": {"codec": "nvfp4"},
    "plain": {},
    "8 bits": {"bits": 8, "group_size": 32},
    "4 bits, rotated": {"bits": 4, "group_size": 32, "codec": "rotated"},
    "4 bits, keys centred": {"codec": (Centred(CENTRE, Affine(4, 32)), Affine(4, 32))},
    "mxfp8 keys, plain values": {"codec": ("mxfp8", "plain")},
    "8-bit keys, nvfp4 values": {"codec": (Affine(8, 32), Microscaled("nvfp4"))},
}
SHORT_SNAP = "snap_kv of the last 3"  # 64 would be all that there are
register_score(SHORT_SNAP, snap_kv, wants=Wants(queries=3))
SCORES = ("tova", "snap_kv", SHORT_SNAP, "kvzip")
SHARES: tuple[Any, ...] = ("layers", "layer", "head", "adaptive")
STEPS = 20
OTHER_STEPS = ["join", "another", "filter", "extract", "compact", "replace"]
TIE = 1e-5  # of the largest score: two tokens whose scores differ by less may change places by rounding


@dataclass(frozen=True)
class ObservedKind(Kind):
    """What kind of cache."""

    @property
    def reads_twice(self) -> bool:
        return self.policy.reads_twice


def kind(stored: str, score: str, share: Any, carries: bool = True, keep_recent: int = 4) -> ObservedKind:
    numbers = {"budget": 12, "keep_recent": keep_recent, "sinks": 2, "margin": 3}
    policy = CachePolicy(score=score, share=share, **numbers, **STORED[stored])
    return ObservedKind(policy, layers=2, carries=carries)


def kept(cache: KVCache, row: int) -> list[list[int]]:
    """The positions of the tokens of one row, of each head in the order of slots."""
    cache, row = places_of(cache)[row]
    lines = [[]] if cache.empty() else cache.positions[row].tolist()
    found = [[position for position in line if position >= 0] for line in lines]
    return found * HEADS if len(found) == 1 else found


def followed(cache: KVCache, row: int) -> int:
    """How many tokens a row can take back so that as much is known as if they had never been seen."""
    cache, row = places_of(cache)[row]
    evictor = cache.evictor
    assert evictor is not None
    seen, everything = evictor.observation, cache.view.rows[row].offset
    return everything if seen is None or len(seen.ends) <= row else min(everything, seen.max_trim(row))


class TieError(Exception):
    """A history has come to a choice between two tokens of one score, which rounding decides."""


Ranking = dict[tuple[int, int], float]  # the score of each head and position, comparable with one another


@dataclass
class ObservedSingle(Single):
    """A sequence alone, whose attention is seen.

    Attributes:
        rankings: of its evictable tokens when it was compacted last, by layer.
    """

    rankings: list[Ranking] = field(default_factory=list)

    def flush(self) -> None:
        for cache, (q, k, v) in zip(self.caches, self.pending, strict=False):
            if k.shape[1]:
                attention(cache, *(mx.array(x)[None] for x in (q, k, v)))
        self.pending = []

    def touch(self) -> None:
        self.note_scores(lambda cache: cache.layout.due(cache.view.rows[0]))
        super().touch()

    def copied(self) -> ObservedSingle:
        return ObservedSingle(copy.deepcopy(self.caches), list(self.pending), self.rankings)

    def note_scores(self, due: Callable[[KVCache], bool]) -> None:
        """What the next compaction goes by, if it is due."""
        if all(map(due, self.caches)):
            together = self.caches[0].evictor.scope == "layers"
            each = [ranking(cache, standardised=together) for cache in self.caches]
            summed = {at: sum(own[at] for own in each) for at in each[0]} if together else {}
            self.rankings = [summed] * len(each) if together else each


def ranking(cache: KVCache, standardised: bool) -> Ranking:
    row, layout = cache.view.rows[0], cache.layout
    scores, positions = np.array(cache.evictor.live_scores(0)), np.array(cache.positions[0])
    which = slice(layout.sinks, row.end - layout.keep_recent)
    scores, positions = scores[:, which], np.broadcast_to(positions, scores.shape)[:, which]
    if standardised:
        scores = (scores - scores.mean(axis=1, keepdims=True)) / np.maximum(scores.std(axis=1, keepdims=True), 1e-12)
    lines = enumerate(zip(positions, scores, strict=True))
    return {(h, int(p)): float(x) for h, line in lines for p, x in zip(*line, strict=True) if p >= 0}


def is_tie(got: list[list[int]], wanted: list[list[int]], scores: Ranking) -> bool:
    """Whether rounding alone explains that a compaction kept other tokens: all that changed places score the same."""
    heads = 1 + max(head for head, _ in scores)
    places = {(h, p) for h in range(heads) for p in set(got[h]) ^ set(wanted[h])}
    if not places <= scores.keys():
        return False
    swapped = [scores[place] for place in places]
    return bool(swapped) and max(swapped) - min(swapped) <= TIE * max(map(abs, scores.values()))


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories change these; one that raises as it begins has no teardown."""
    monkeypatch.setattr(WriteCapacity, "PERIOD", WriteCapacity.PERIOD)
    monkeypatch.setattr(scoring, "MIN_TRIM", MIN_TRIM)


class ObservedBatches(Batches):
    """Batches of rows whose attention is seen."""

    def __init__(self, kind: ObservedKind, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        draw = self.random
        scoring.MIN_TRIM = draw.choice([6, 6, MIN_TRIM])
        self.begin(kind, draw.randint(1, 3), seed, draw.choice([1, 2, 3, 32]))
        self.prefill(0.0, [draw.randint(0, 24) for _ in range(MOST_ROWS)], draw.randint(1, 13))
        self.steps: list[tuple[str, dict[str, Any]]] = []

    def step(self) -> None:
        """Something happens to a batch."""
        draw = self.random
        what = draw.choice(["update"] * 5 + ["prefill", "trim"] * 3 + OTHER_STEPS)
        if (what == "join" and len(self.batches) < 2) or (what in ("another", "extract") and len(self.batches) > 2):
            return
        fractions = [draw.random() for _ in range(MOST_ROWS)]
        how = {
            "update": lambda: {"new": draw.choice([1, 1, draw.randint(1, 8)])},
            "prefill": lambda: {"lengths": [int(12 * f) for f in fractions], "chunk": draw.randint(1, 11)},
            "trim": lambda: {"fractions": fractions, "uniform": draw.random() < 0.5},
            "filter": lambda: {"order": draw.sample(range(MOST_ROWS), MOST_ROWS), "keep": draw.randint(1, MOST_ROWS)},
            "extract": lambda: {"row": draw.random()},
            "replace": lambda: {"load": draw.random() < 0.5},
            "join": lambda: {"extend": draw.random() < 0.5},
            "another": lambda: {"rows": draw.randint(1, 2)},
            "compact": dict,
        }[what]()
        if what not in ("join", "another"):
            how["which"] = draw.random()
        self.steps.append((what, how))
        getattr(self, what)(**how)
        self.rows_stand_where_they_would_alone()

    def teardown(self) -> None:
        super().teardown()
        scoring.MIN_TRIM = MIN_TRIM

    def _new(self, rows: int) -> tuple[list[Any], list[Single]]:
        each, alone = [self.kind.make() for _ in range(rows)], [self.kind.alone() for _ in range(rows)]
        if self.kind.reads_twice:
            for caches, single in zip(each, alone, strict=True):
                self._read_twice([caches, single], int(self.rng.integers(4, 15)))
        merged = [KVCache.merge([caches[layer] for caches in each]) for layer in range(self.kind.layers)]
        return merged, [ObservedSingle(caches) for caches in alone]

    def _read_twice(self, sequences: Sequence[list[KVCache]], length: int) -> None:
        """Each reads the same text, and repeats it: what that looks at is kept."""
        for layer in range(self.kind.layers):
            shapes = [(1, heads, 2 * length, DIM) for heads in (QUERY_HEADS, HEADS, HEADS)]
            tokens = [self.rng.normal(size=shape).astype(np.float32) for shape in shapes]
            for caches in sequences:
                cache = caches[layer]
                cache.hold()
                attention(cache, *(mx.array(x[:, :, :length]) for x in tokens))
                cache.evictor.begin_second_pass(0, length)
                attention(cache, *(mx.array(x[:, :, length:]) for x in tokens))
                cache.trim(length)
                cache.evictor.end_second_pass()
                cache.release()

    def _feed(self, batch: tuple[list[Any], list[Single]], new: int, counts: list[int]) -> None:
        try:
            super()._feed(batch, new, counts)
        except AssertionError:
            self._check_kept([batch])
            raise

    def trim(self, which: float, fractions: list[float], uniform: bool) -> None:
        """As far as what was seen can be followed; further back, a row begins anew where its batch stands."""
        caches, singles = self._pick(which)
        counts = [int(f * 9) for f, _ in zip(fractions, singles, strict=False)]
        for row, single in enumerate(singles):
            pending = single.pending[0][1].shape[1] if single.pending else 0
            alone = max(pending - 1, min(followed(single.caches[0], 0), scoring.MIN_TRIM))
            counts[row] = min(counts[row], most_trims(caches[0])[row], followed(caches[0], row), alone)
        for cache in caches:
            cache.trim_per_sequence([min(counts)] * len(counts) if uniform else counts)
        for single, count in zip(singles, counts, strict=True):
            single.trim(min(counts) if uniform else count)

    def compact(self, which: float) -> None:
        for single in self._pick(which)[1]:
            single.flush()
            single.note_scores(lambda cache: cache.layout.visible_tokens(cache.view.rows[0]) > cache.layout.budget)
        super().compact(which)

    def rows_stand_where_they_would_alone(self) -> None:
        for caches, singles in self.batches:
            for cache in caches:
                offsets = [cache.offset] * len(singles) if isinstance(cache.offset, int) else cache.offset.tolist()
                assert offsets == [single.length for single in singles]
        self._check_kept(self.batches)

    def _check_kept(self, batches: Sequence[tuple[list[Any], list[Single]]]) -> None:
        """Each row keeps the tokens that it keeps alone; a history ends without a verdict where two tokens tie."""
        for caches, singles in batches:
            for row, single in enumerate(singles):
                for layer, (cache, alone) in enumerate(zip(caches, single.caches, strict=True)):
                    wanted = kept(alone, 0)
                    got = [[p for p in line if p < alone.offset] for line in kept(cache, row)]
                    if got != wanted and single.rankings and is_tie(got, wanted, single.rankings[layer]):
                        raise TieError
                    assert got == wanted, f"row {row} keeps other tokens in layer {layer}"


def history(kind: ObservedKind, seed: int) -> int:
    """Random steps, each row beside itself alone; returns how many compactions there were."""
    batches = ObservedBatches(kind, seed)
    try:
        for _ in range(STEPS):
            batches.step()
    except TieError:
        return 0
    except Exception as error:
        error.add_note(f"seed {seed}, {kind}; {batches.steps}")
        raise
    finally:
        batches.teardown()
    return sum(cache.evictor.compactions for caches, _ in batches.batches for cache in caches)


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("stored", STORED)
def test_each_row_is_what_it_would_be_alone(stored: str, score: str) -> None:
    first = 4 * (len(SCORES) * list(STORED).index(stored) + SCORES.index(score))
    count = 100 if THOROUGH else 4 if stored == "mxfp8" else 2
    compactions = 0  # of rows that are there at the end
    for number in range(count):
        share = SHARES[(first // 4 + first // 16 + number) % 4]  # the next codec goes on with others
        made = kind(stored, score, share, carries=number % 2 == 0, keep_recent=(4, 4, 0)[(first // 4 + number) % 3])
        compactions += history(made, first + 1000 * number)
    assert compactions >= count, "too few for a verdict"


def test_tokens_that_change_places_tie_only_if_their_scores_are_the_same() -> None:
    scores = {(0, p): float(p) for p in range(5)} | {(0, 5): 3 + TIE / 2}
    assert is_tie([[0, 1, 3]], [[0, 1, 5]], scores)
    assert not is_tie([[0, 1, 3]], [[0, 1, 4]], scores)
    assert not is_tie([[0, 1, 3]], [[0, 1, 3]], scores)  # in another order
    assert not is_tie([[0, 1, 3]], [[0, 1, 9]], scores)  # one without a score


# --- the machine above must be able to fail: bugs planted one at a time ---------------------------------------------


def sees_padding(self: Observation, call: Any, answer: mx.array, rows: Any, counts: Any) -> mx.array:
    return see(self, call, answer, rows, None)


def mixes_up_queries(self: RecentQueries, chosen: Sequence[int]) -> RecentQueries:
    return queries_of_rows(self, chosen[::-1])


def remembers_drafts(self: Observation, rows: Sequence[Any]) -> None:
    self.ends = [min(end, max(0, row.offset)) for end, row in zip(self.ends, rows, strict=True)]


def forgets_what_was_reread(self: RowMetadata, other: RowMetadata, copies: Any) -> RowMetadata:
    return joined_members(self, other, copies)._replace(reread=())


see, queries_of_rows, joined_members = Observation.see, RecentQueries.of_rows, RowMetadata.join
PLANTED: dict[str, tuple[Any, str, Any, ObservedKind]] = {
    "padding is seen": (Observation, "see", sees_padding, kind("mxfp8", "tova", "layers")),
    "queries go to other rows": (RecentQueries, "of_rows", mixes_up_queries, kind("mxfp4", "tova", "head")),
    "drafts are remembered": (Observation, "trim", remembers_drafts, kind("8 bits", "tova", "head")),
    "a second reading is lost": (RowMetadata, "join", forgets_what_was_reread, kind("mxfp8", "kvzip", "layers")),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken, only = PLANTED[bug]
    monkeypatch.setattr(where, name, broken)
    # It ends at the first history that differs; tokens or outputs may be what is seen first.
    with pytest.raises((AssertionError, ValueError)):
        _ = [history(only, seed) for seed in range(60)]
