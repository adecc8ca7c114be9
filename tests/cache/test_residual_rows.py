"""Rows of batches that see their newest tokens as they came: each is what it would be alone, whatever room there is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from test_batch_rows import Batches, Kind
from test_row_classes import ClassedBatches

from mlx_kv import CachePolicy

STORED: tuple[dict[str, Any], ...] = ({"bits": 4, "group_size": 32}, {"codec": ("mxfp8", "plain")})


def kinds() -> st.SearchStrategy[Kind]:
    def made(stored: dict[str, Any], length: int, bound: str, carries: bool, room: int) -> Kind:
        if bound in ("layers", "layer", "head"):
            budget = {"budget": 12, "keep_recent": 4, "sinks": 2, "margin": 3, "share": bound}
            policy = CachePolicy(residual_length=length, **stored, **budget)
            return Kind(policy, layers=2, carries=carries, room=room)
        policy = CachePolicy(max_write=5, max_rollback=2, residual_length=length, **stored)
        window, chunk = 9 if bound == "ring" else None, 6 if bound == "chunks" else None
        return Kind(policy, window, chunk, carries=carries, room=room)

    bounds = st.sampled_from(["full", "ring", "chunks", "layers", "layer", "head"])
    return st.builds(made, st.sampled_from(STORED), st.integers(1, 4), bounds, st.booleans(), st.sampled_from([3, 64]))


class NewestBatches(Batches):
    @initialize(kind=kinds(), rows=st.integers(1, 3), seed=st.integers(0, 999), period=st.sampled_from([1, 2, 3, 32]))
    def begin(self, kind: Kind, rows: int, seed: int, period: int) -> None:
        super().begin(kind, rows, seed, period)


class NewestClassedBatches(ClassedBatches):
    @initialize(kind=kinds(), rows=st.integers(1, 3), seed=st.integers(0, 999), period=st.sampled_from([1, 2, 3, 32]))
    def begin(self, kind: Kind, rows: int, seed: int, period: int) -> None:
        super().begin(kind, rows, seed, period)


NewestBatches.TestCase.settings = Batches.TestCase.settings
NewestClassedBatches.TestCase.settings = ClassedBatches.TestCase.settings
TestNewestBatches = pytest.mark.slow(NewestBatches.TestCase)
TestNewestClassedBatches = pytest.mark.slow(NewestClassedBatches.TestCase)
