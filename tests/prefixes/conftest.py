"""Places, and blocks so small that tests with few tokens have several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conversations import make_blocks_small
from places import Place, new_place


@pytest.fixture(scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_blocks_small(patch)
        yield


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return new_place(request.param, tmp_path)
