"""Ranks that have a model together generate what one process does, whatever is asked of them."""

from __future__ import annotations

import json
from typing import Any

import mlx.nn as nn
import pytest
from generating import CASES, make_family, ranked
from launching import run_ranks, succeeded


@pytest.mark.parametrize(("family", "split", "size"), [("qwen2", "heads", 2), ("qwen2", "layers", 2)])
def test_the_tokens_are_those_of_one_process(family: str, split: str, size: int) -> None:
    names = list(CASES)
    model = make_family(family)
    finished = succeeded(run_ranks(size, ranked, family, split, *names, timeout=120))
    for rank, each in enumerate(finished):
        told = dict(json.loads(line) for line in each.stdout.splitlines())
        assert list(told) == names
        wrong = [name for name in names if name != "pace" and told[name] != expected(model, name)]
        assert wrong == [], f"rank {rank}: {[(name, told[name], expected(model, name)) for name in wrong[:1]]}"


KNOWN: dict[tuple[int, str], Any] = {}


def expected(model: nn.Module, name: str) -> Any:
    key = id(model), name
    if key not in KNOWN:
        KNOWN[key] = json.loads(json.dumps(CASES[name](model, None)))
    return KNOWN[key]
