"""Every pair of features, in random histories: each row is what it would be alone, whatever happens to its batch.

What a cache is made with (`MADE`) is paired in one policy; what happens to caches (`HAPPENS`) happens in every history,
each at least once. `PYTHONPATH=tests python tests/cache/test_feature_pairs.py` prints which pairs there are, and why
the others cannot be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from calibrations import random_calibration
from classes import anywhere
from effort import PROFILE, THOROUGH
from oracle import HEADS
from test_batch_rows import DIM, MOST_ROWS, Batches, Kind, Single
from test_observed_codecs import ObservedBatches, ObservedKind, TieError

from mlx_kv import CachePolicy, PromptMemory, load_prompt_cache, save_prompt_cache
from mlx_kv.cache import row_classes
from mlx_kv.cache.segmented import SegmentedCache
from mlx_kv.mlxlm.traverse import attention_caches
from mlx_kv.prefixes import index

CODECS: dict[str, dict[str, Any]] = {
    "8 bits": {"bits": 8, "group_size": 32},
    "rotated": {"bits": 4, "group_size": 32, "codec": "rotated"},
    "pair of codecs": {"codec": ("mxfp8", "plain")},
    "mxfp8": {"codec": "mxfp8"},
}
BUDGET: dict[str, Any] = {"budget": 12, "keep_recent": 4, "sinks": 2, "margin": 3}
SHARES = {f"share={share}": {**BUDGET, "share": share} for share in ("layers", "layer", "head", "adaptive")}
SCORES = {f"score={score}": {**BUDGET, "score": score} for score in ("tova", "snap_kv", "kvzip")} | {
    "score=fitted": {**BUDGET, "score": random_calibration(HEADS, DIM, layers=2).score}
}
VERY_UNEQUAL = ((3.0, 0.0), (0.6, 0.4))  # of two layers: one head keeps everything for long, another nothing
ALLOCATED = {
    "head x table": {**BUDGET, "share": "head", "layers": VERY_UNEQUAL},
    "adaptive x table": {**BUDGET, "share": "adaptive", "layers": VERY_UNEQUAL},
    "layer x table": {**BUDGET, "share": "layer", "layers": VERY_UNEQUAL},
}
UNEVEN = ("share=adaptive", "head x table", "adaptive x table")
BOUNDS: dict[str, dict[str, Any]] = {"ring": {"window": 9}, "chunks": {"chunk": 6}}
OTHERS: dict[str, dict[str, Any]] = {
    "residual": {"residual_length": 3},
    "quantized_start": {"quantized_start": 9},
    "classes": {},
}
MADE = {**CODECS, **SHARES, **ALLOCATED, **SCORES, **BOUNDS, **OTHERS}
HAPPENS = ("chunks of prompts", "trims", "drafts", "files", "kept prompts", "copies", "joins", "rows leave", "compact")
OTHER_LAYERS = "of different layers of a model: tests/mlxlm/test_families.py"
MOST = 8 if PROFILE in ("quick", "usual") else 14


@dataclass(frozen=True)
class Case:
    """A pair of features in one kind of cache."""

    names: tuple[str, str]

    @property
    def impossible(self) -> str | None:
        """Why the two are never in one cache."""
        for of in (CODECS, {**SHARES, **ALLOCATED}, SCORES, BOUNDS):
            if set(self.names) <= of.keys():
                return "one of them at a time"
        bounded = [name for name in self.names if name in BOUNDS]
        if bounded and any("budget" in MADE[name] for name in self.names):
            return OTHER_LAYERS
        if "residual" in self.names and any(name in UNEVEN for name in self.names):
            return "refused: heads of different lengths have no common newest tokens"
        if set(self.names) == {"quantized_start", "classes"}:
            return "a batch quantises all rows at once, and so other rows at other times than alone"
        return None

    def kind(self, carries: bool) -> Kind:
        """What both make together; of a budget two layers, which stay in step."""
        settings: dict[str, Any] = {}
        for name in self.names:
            settings |= MADE[name]
        if {"residual", "quantized_start"} & set(self.names) and not settings.keys() & {"bits", "codec"}:
            settings |= CODECS["rotated"]
        window, chunk = settings.pop("window", None), settings.pop("chunk", None)
        if "budget" in settings:
            return ObservedKind(CachePolicy(**settings), layers=2, carries=carries)
        policy = CachePolicy(max_write=5, max_rollback=2, **settings)
        return Kind(policy, window, chunk, carries=carries)


PAIRS = [Case(names) for names in itertools.combinations(MADE, 2)]
CASES = [case for case in PAIRS if case.impossible is None]


class History(ObservedBatches):
    """Batches of a pair, to which all of `HAPPENS` happens."""

    def __init__(self, case: Case, seed: int, folder: Path) -> None:
        self.case, self.folder, self.seed = case, folder, seed
        self.alone_only = "quantized_start" in case.names  # a batch quantises when its first row gets there
        if "classes" in case.names:
            row_classes.assign_classes = anywhere(seed)  # type: ignore[assignment]
        super().__init__(case.kind(carries=seed % 2 == 0), seed)  # type: ignore[arg-type]

    @property
    def observes(self) -> bool:
        return self.kind.policy.budget is not None

    def begin(self, kind: Kind, rows: int, seed: int, period: int) -> None:
        super().begin(kind, 1 if self.alone_only else rows, seed, period)

    def teardown(self) -> None:
        super().teardown()
        row_classes.assign_classes = RULE

    def made(self, cache: Any) -> Any:
        return SegmentedCache(cache) if "classes" in self.case.names else cache

    def _new(self, rows: int) -> Any:
        if not self.observes:
            return Batches._new(self, rows)
        batches, singles = super()._new(rows)
        if "classes" in self.case.names:
            batches = [SegmentedCache(cache) for cache in batches]
        return batches, singles

    def _again(self, caches: list[Any]) -> None:
        """What files and copies do not have: what shows attention."""
        for cache in attention_caches(caches):
            if self.kind.carries and cache.seam is None:
                cache.carry(object())

    def replace(self, which: float, load: bool) -> None:
        Batches.replace(self, which, load)
        self._again(self._pick(which)[0])

    def _feed(self, batch: Any, new: int, counts: list[int]) -> None:
        if self.observes:
            super()._feed(batch, new, counts)
        else:
            Batches._feed(self, batch, new, counts)

    def trim(self, which: float, fractions: list[float], uniform: bool) -> None:
        if self.observes:
            super().trim(which, fractions, uniform)
        else:
            Batches.trim(self, which, fractions, uniform)

    def compact(self, which: float) -> None:
        if self.observes:
            super().compact(which)
        else:
            Batches.compact(self, which)

    def rows_stand_where_they_would_alone(self) -> None:
        if self.observes:
            super().rows_stand_where_they_would_alone()

    def drafts(self, which: float) -> None:
        """Some are accepted: a write of several tokens, of which each row gives back some."""
        self.update(which, self.random.choice([2, 3, 5]))
        self.trim(which, [self.random.random() / 3 for _ in range(MOST_ROWS)], False)

    def files(self, which: float) -> None:
        """A batch goes on from a file; of rows in classes, one row does."""
        caches, singles = self._pick(which)
        if "classes" in self.case.names:
            row = self.random.randrange(len(singles))
            self._go_on(self._through_file([cache.extract(row) for cache in caches]), singles[row])
        else:
            caches[:] = self._through_file(caches)

    def _through_file(self, caches: list[Any]) -> list[Any]:
        path = self.folder / "kept.safetensors"
        save_prompt_cache(path, caches, force=True)
        loaded = load_prompt_cache(path)
        self._again(loaded)
        return loaded

    def kept_prompts(self, which: float) -> None:
        """A row is kept under the tokens that it has read, and found by a prompt that goes on from them."""
        caches, singles = self._pick(which)
        row = self.random.randrange(len(singles))
        count, memory = singles[row].length, PromptMemory(fingerprint="these")
        if count < 2:
            return
        memory.keep(range(count), [cache.extract(row) for cache in caches])
        found = memory.find([*range(count), 10**6])
        assert found is not None
        assert found[1] == count
        self._go_on(found[0], singles[row])

    def _go_on(self, caches: list[Any], single: Single) -> None:
        """Copies of a row, as a batch of their own."""
        self._again(caches)
        self.batches.append(([self.made(cache) for cache in caches], [single.copied()]))
        if len(self.batches) > 3:
            self.batches.pop(0)

    def run(self) -> None:
        """Each of what can happen, in some order, and some of it again."""
        draw, which = self.random, self.random.random

        def fractions() -> list[float]:
            return [draw.random() for _ in range(MOST_ROWS)]

        steps: dict[str, Callable[[], object]] = {
            "chunks of prompts": lambda: self.prefill(which(), [int(12 * f) for f in fractions()], draw.randint(1, 11)),
            "trims": lambda: self.trim(which(), fractions(), draw.random() < 0.5),
            "drafts": lambda: self.drafts(which()),
            "files": lambda: self.files(which()),
            "kept prompts": lambda: self.kept_prompts(which()),
            "copies": lambda: self.replace(which(), draw.random() < 0.5),
            "joins": self._joined,
            "rows leave": lambda: self.filter(
                which(), draw.sample(range(MOST_ROWS), MOST_ROWS), draw.randint(1, MOST_ROWS)
            ),
            "compact": lambda: self.compact(which()),
        }
        assert tuple(steps) == HAPPENS
        order = draw.sample(HAPPENS, len(HAPPENS))
        for name in [*order, *draw.choices(HAPPENS, k=MOST - len(HAPPENS) if len(HAPPENS) < MOST else 0)]:
            self.steps.append((name, {}))
            steps[name]()
            for _ in range(draw.choice([1, 1, 2, 6])):
                self.update(which(), draw.choice([1, 1, 1, draw.randint(1, 8)]))
            self.rows_stand_where_they_would_alone()

    def _joined(self) -> None:
        if self.alone_only:
            return
        if len(self.batches) < 2:
            self.another(self.random.randint(1, 2))
        self.update(0.99, 3)
        self.join(self.random.random() < 0.5)


RULE = row_classes.assign_classes


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of histories are short: they are kept all the same."""
    monkeypatch.setattr(index, "MIN_SHARED", 1)


def happens(case: Case, seed: int, folder: Path) -> bool:
    """One history; False where two tokens of one score came to be compared, which rounding decides."""
    history = History(case, seed, folder)
    try:
        history.run()
    except TieError:
        return False
    except Exception as error:
        error.add_note(f"seed {seed}, {case.names}; {[name for name, _ in history.steps]}")
        raise
    finally:
        history.teardown()
    return True


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: " x ".join(case.names))
def test_each_row_is_what_it_would_be_alone(case: Case, tmp_path: Path) -> None:
    count = -(-2000 // len(CASES)) if THOROUGH else 1
    first = 7 * CASES.index(case)
    decided = [happens(case, first + number, tmp_path) for number in range(count)]
    assert any(decided) or count == 1


def test_no_pair_is_empty() -> None:
    """Each is in a history, or cannot be; what is said to be refused, is."""
    covered = {frozenset(case.names) for case in CASES}
    for case in PAIRS:
        assert (frozenset(case.names) in covered) != (case.impossible is not None)
        if (case.impossible or "").startswith("refused"):
            with pytest.raises(ValueError, match="residual_length"):
                case.kind(carries=False)
        elif case.impossible is None:
            assert case.kind(carries=False).make()


def main() -> None:
    names = list(MADE)
    for row, name in enumerate(names):
        for other in names[row + 1 :]:
            case = Case((name, other))
            print(f"{name} x {other}: {case.impossible or 'test_each_row_is_what_it_would_be_alone'}")
    for name, happening in itertools.product(names, HAPPENS):
        print(f"{name} x {happening}: in each history of {name}")


if __name__ == "__main__":
    main()
