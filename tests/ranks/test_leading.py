"""The leader's engine, with ranks that follow: rows come and go as in one process."""

from __future__ import annotations

import functools
import json

import pytest
from launching import run_ranks, succeeded
from leading import CASES, alone, astray, ranked

expected = functools.cache(alone)
EVERYTHING = tuple(CASES)
# One rank alone has layers with a budget, and it does not lead: so no budget can be that all layers share.
BY_LAYER = ("rows", "rows, draft", *(name for name in CASES if "of a layer" in name))
FEW = (
    "rows, processed",
    "rows, head",
    "rows, budget, draft",
    "failed, budget",
    "going on, plain",
    "going on, budget, draft",
)


@pytest.mark.parametrize(
    ("family", "split", "size", "names"),
    [
        ("ministral3", "layers", 2, EVERYTHING),
        ("qwen3_next of 3", "layers", 3, BY_LAYER),
        ("llama", "heads", 3, FEW),
        pytest.param("qwen2", "heads", 2, EVERYTHING, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_an_engine_of_all_ranks_gives_what_one_of_a_process_does(
    family: str, split: str, size: int, names: tuple[str, ...]
) -> None:
    first, *others = succeeded(run_ranks(size, ranked, family, split, *names, timeout=240))
    told = dict(json.loads(line) for line in first.stdout.splitlines())
    wrong = [name for name in names if told[name] != expected(family, name)]
    assert wrong == [], [(told[name], expected(family, name)) for name in wrong[:1]]
    assert [each.stdout for each in others] == [""] * (size - 1)


@pytest.mark.slow
def test_a_rank_that_no_longer_does_as_the_leader_ends_all_with_one_line() -> None:
    first, second = run_ranks(2, astray, "qwen2", "layers", timeout=120)
    assert first.stdout == "cancelled\n"
    assert (first.code, second.code) == (70, 70)
    for each in (first, second):
        lines = [line for line in each.stderr.splitlines() if line.startswith("mlx-kv")]
        assert len(lines) == 1, each.stderr
        assert "rank 1" in lines[0]
