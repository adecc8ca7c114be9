"""Prompts that are kept by several ranks, each its part, in memory and in a directory, are found as by one process."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from launching import MLX_KV, run_ranks, started_ranks, succeeded
from prefix_programs import alone, opening, ranked

TEXT = (Path(__file__).parent.parent / "source.txt").read_text()[:1500]


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


def test_a_store_of_two_ranks_is_refused_by_three(tmp_path: Path) -> None:
    """The leader, a program that ends with this error, and the others, which hear of it."""
    succeeded(run_ranks(2, opening, "qwen2", tmp_path, timeout=60))
    finished = run_ranks(3, opening, "qwen2", tmp_path, timeout=60)
    assert [each.code for each in finished] == [1, 2, 2]
    why = "it was made by 2 ranks, of which each has some layers, not by 3 ranks, of which each has some layers"
    assert all(why in each.stderr for each in finished)


def test_serve_finds_what_was_kept_before_a_new_start(tmp_path: Path) -> None:
    """On the disks of both ranks; the answers are those of one process, and so is what is found of the second."""
    prompts = [f"{TEXT}\ndef {name}(" for name in ("first", "second", "first")]
    told: dict[int, list[list[Any]]] = {1: [], 2: []}
    for size in (1, 2):
        options = ("serve", "--port", 0, "--prompt-memory-bytes", 0, "--prompt-store", tmp_path / f"{size}")
        for _ in range(2):
            with started_ranks(size, MLX_KV, *options) as ranks:
                url = ranks.wait_for(" at http://").split(" at ")[1].split("/v1")[0]
                for prompt in prompts:
                    body = {"prompt": prompt, "max_tokens": 8}
                    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
                    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                    told[size].append([answer["choices"][0]["text"], cached > 200])
                ranks.kill(0, signal.SIGTERM)
                finished = ranks.wait(20)
                assert [each.code for each in finished] == [0] * size
                assert "could not be used" not in finished[0].stderr
    assert [text for text, _ in told[1]] == [text for text, _ in told[2]]
    assert [there for _, there in told[2]][3:] == [True] * 3
    (refused,) = run_ranks(1, MLX_KV, *options, timeout=60)
    assert refused.code == 2
    assert "it was made by 2 ranks, of which each has some heads, not by one process, which has all" in refused.stderr
