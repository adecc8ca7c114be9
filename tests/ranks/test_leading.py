"""The leader's engine, with ranks that follow: rows come and go and caches are kept as in one process."""

from __future__ import annotations

import functools
import json

import pytest
from launching import run_ranks, succeeded
from leading import CASES, alone, ranked

expected = functools.cache(alone)
EVERYTHING = tuple(CASES)
# Of layers that some ranks have none of, no budget can be that all layers share.
BY_LAYER = tuple(name for name in CASES if "budget" not in name or "of a layer" in name)
FEW = ("rows, budget, draft", "made anew", "prefixes, budget, draft")


@pytest.mark.parametrize(
    ("family", "split", "size", "names"),
    [
        ("ministral3", "layers", 2, EVERYTHING),
        ("qwen3_next", "layers", 3, BY_LAYER),  # one rank has recurrent layers only, and no budget
        ("llama", "heads", 3, FEW),
        pytest.param("qwen2", "heads", 2, EVERYTHING, marks=pytest.mark.slow),
    ],
)
def test_an_engine_of_all_ranks_gives_what_one_of_a_process_does(
    family: str, split: str, size: int, names: tuple[str, ...]
) -> None:
    first, *others = succeeded(run_ranks(size, ranked, family, split, *names, timeout=240))
    told = dict(json.loads(line) for line in first.stdout.splitlines())
    wrong = [name for name in names if told[name] != expected(family, name)]
    assert wrong == [], [(told[name], expected(family, name)) for name in wrong[:1]]
    assert [each.stdout for each in others] == [""] * (size - 1)
