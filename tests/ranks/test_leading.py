"""The leader's engine, with ranks that follow: rows come and go and caches are kept as in one process."""

from __future__ import annotations

import functools
import json

import pytest
from launching import run_ranks, succeeded
from leading import CASES, alone, ranked

expected = functools.cache(alone)


@pytest.mark.parametrize(("family", "split", "size"), [("qwen2", "heads", 2), ("qwen2", "layers", 2)])
def test_an_engine_of_all_ranks_gives_what_one_of_a_process_does(family: str, split: str, size: int) -> None:
    names = list(CASES)
    first, *others = succeeded(run_ranks(size, ranked, family, split, *names, timeout=120))
    told = dict(json.loads(line) for line in first.stdout.splitlines())
    assert [name for name in names if told[name] != expected(family, name)] == []
    assert [each.stdout for each in others] == [""] * (size - 1)
