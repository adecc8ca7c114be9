"""Prompts that are kept by several ranks, each its part, in memory and in a directory, are found as by one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import run_ranks, succeeded
from prefix_programs import alone, ranked


@pytest.mark.parametrize(
    ("family", "split", "size"),
    [("qwen2", "heads", 2), ("ministral3", "layers", 2)],
)
def test_what_is_found_is_what_one_process_finds(family: str, split: str, size: int, tmp_path: Path) -> None:
    wanted = json.loads(json.dumps(alone(family, str(tmp_path / "alone"))))
    leader = succeeded(run_ranks(size, ranked, family, split, tmp_path / "ranks", timeout=200))[0]
    told = dict(json.loads(line) for line in leader.stdout.splitlines())
    assert told.keys() == wanted.keys()
    for name in wanted:
        if "little" in name:  # there, a part of the caches leaves room for more of them
            assert answers(told[name]) == answers(wanted[name]), name
            assert 0 < found(told[name]) < found(told[name.removeprefix("little ")]), name
        else:
            assert told[name] == wanted[name], name
            assert found(told[name]) > 300, name


def answers(told: list[Any]) -> list[Any]:
    return [[answer for _, answer in run] for run in told]


def found(told: list[Any]) -> int:
    """Tokens that had been read before."""
    return sum(reused for run in told for reused, _ in run)
