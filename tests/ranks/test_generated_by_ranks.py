"""Ranks that have a model together generate what one process does, whatever is asked of them."""

from __future__ import annotations

import functools
import json
from typing import Any

import mlx.nn as nn
import pytest
from generating import BUDGETS, CASES, model_of, ranked
from launching import run_ranks, succeeded

EVERYTHING = tuple(CASES)
FEW = (
    "weights",
    "refused",
    "stream, left early",
    "stream, formed",
    "stream, seeded",
    "batch, seeded",
    "batch, prompts that begin alike",
    *(f"batch, {name}" for name in BUDGETS),
    "suffix, 8 bits",
    "suffix, budget, share=layers",
    "a draft model, another sampler",
    "a head",
    "pace",
)


# MLX attends latent keys: no newest tokens as they came, and no shared segments.
ANSWERED_BY_MLX = tuple(name for name in EVERYTHING if "newest" not in name and "alike" not in name)


@pytest.mark.parametrize(
    ("family", "split", "names"),
    [
        ("qwen2", "layers", EVERYTHING),
        ("qwen2", "heads", FEW),
        pytest.param("qwen2", "heads", EVERYTHING, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "heads", ANSWERED_BY_MLX, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_the_tokens_are_those_of_one_process(family: str, split: str, names: tuple[str, ...]) -> None:
    model = shared(family)
    for rank, each in enumerate(succeeded(run_ranks(2, ranked, family, split, *names, timeout=240))):
        told = dict(json.loads(line) for line in each.stdout.splitlines())
        assert tuple(told) == names
        wrong = [name for name in names if tokens(name, told[name]) != tokens(name, expected(model, name))]
        assert wrong == [], f"rank {rank}: {[(name, told[name], expected(model, name)) for name in wrong[:1]]}"


def tokens(name: str, told: Any) -> Any:
    """What must be the same; how many tokens were drafted by the clock need not be."""
    return [item[0] for item in told[:-2]] if name == "pace" else told


shared = functools.cache(model_of)
KNOWN: dict[tuple[int, str], Any] = {}


def expected(model: nn.Module, name: str) -> Any:
    key = id(model), name
    if key not in KNOWN:
        KNOWN[key] = json.loads(json.dumps(CASES[name](model, None)))
    return KNOWN[key]
