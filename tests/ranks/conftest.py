"""Ranks wait for each other by spinning, so several runs of them on few cores wait for each other's time slices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from filelock import FileLock


@pytest.fixture(autouse=True)
def one_run_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of all processes that test now."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "ranks.lock"):
        yield
