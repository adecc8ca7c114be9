"""A place, and blocks so small that tests with few tokens have several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conversations import make_blocks_small
from places import Place


@pytest.fixture(scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_blocks_small(patch)
        yield


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "store")
