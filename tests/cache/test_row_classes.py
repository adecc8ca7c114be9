"""Rows by class: whatever rule puts rows into caches, each row is what it would be alone."""

from __future__ import annotations

import os
from typing import Any

import pytest
from classes import anywhere
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from test_batch_rows import Batches, Kind, kinds

from mlx_kv import KVCache
from mlx_kv.cache.classes import RowClasses, moving


class ClassedBatches(Batches):
    """The same histories, of batches whose rows go from class to class."""

    def made(self, cache: KVCache) -> Any:
        return RowClasses(cache)

    @initialize(kind=kinds(), rows=st.integers(1, 3), seed=st.integers(0, 999))
    def begin(self, kind: Kind, rows: int, seed: int) -> None:
        self.genuine = moving.settled
        moving.settled = anywhere(seed)  # type: ignore[assignment]
        super().begin(kind, rows, seed)

    def teardown(self) -> None:
        moving.settled = self.genuine


ClassedBatches.TestCase.settings = settings(
    max_examples=1000 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 100,
    stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
)
TestClassedBatches = pytest.mark.slow(ClassedBatches.TestCase)
