"""Rows by class: whatever rule puts rows into caches, each row is what it would be alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from classes import anywhere
from effort import HISTORIES
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test
from test_batch_rows import Batches, Kind, kinds

from mlx_kv import CachePolicy, KVCache
from mlx_kv.cache import row_classes
from mlx_kv.cache.row_classes import Parts
from mlx_kv.cache.segmented import DeferredMask, SegmentedCache

RULE = row_classes.assign_classes


class ClassedBatches(Batches):
    """The same histories, of batches whose rows go from class to class."""

    def made(self, cache: KVCache) -> Any:
        return SegmentedCache(cache)

    @initialize(kind=kinds(), rows=st.integers(1, 3), seed=st.integers(0, 999), period=st.sampled_from([1, 2, 3, 32]))
    def begin(self, kind: Kind, rows: int, seed: int, period: int) -> None:
        row_classes.assign_classes = anywhere(seed)  # type: ignore[assignment]
        super().begin(kind, rows, seed, period)

    def teardown(self) -> None:
        row_classes.assign_classes = RULE
        super().teardown()


ClassedBatches.TestCase.settings = settings(
    max_examples=HISTORIES,
    stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
)
TestClassedBatches = pytest.mark.slow(ClassedBatches.TestCase)


# --- the histories above must be able to fail: bugs planted one at a time -------------------------------------------


def rows_stay_shuffled(self: Parts, outputs: Any) -> Any:
    return mx.concatenate(list(outputs))


def forgets_copies_between(self: SegmentedCache, moved: row_classes.Regrouping) -> None:
    self._set_parts(moved.parts)


def one_mask_for_all(self: DeferredMask, number: int, cache: KVCache) -> Any:
    known = self._known
    return known.setdefault("all", None if known else cache.make_mask(self._new, self._return_array, self._window))


BUDGET = Kind(CachePolicy(budget=12, keep_recent=4, sinks=2, margin=3, score="key_norm"), layers=2)
FULL = Kind(CachePolicy())
PLANTED = {
    "rows come back in another order": (Parts, "joined", rows_stay_shuffled, FULL),
    "layers of a sequence lose one another": (SegmentedCache, "_apply", forgets_copies_between, BUDGET),
    "one mask serves all classes": (DeferredMask, "of", one_mask_for_all, FULL),
}


@pytest.mark.slow
def test_layers_of_a_budget_stay_together_wherever_rows_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClassedBatches, "only", BUDGET)
    run_state_machine_as_test(ClassedBatches, settings=settings(max_examples=HISTORIES, stateful_step_count=25))


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken, kind = PLANTED[bug]
    monkeypatch.setattr(ClassedBatches, "only", kind)
    quick = settings(max_examples=200, stateful_step_count=25, phases=[Phase.generate], report_multiple_bugs=False)
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(BaseException):  # noqa: B017, PT011, the first rule that sees it fails in its own way
        run_state_machine_as_test(ClassedBatches, settings=quick)
