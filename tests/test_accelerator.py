"""The benchmark of accelerators runs here on a small scale, and what hangs costs its own lines only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "accelerator.py"


def run(*words: str) -> tuple[str, dict[str, Any]]:
    asked = [sys.executable, str(PROGRAM), "--shape", "tiny", *words]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    *lines, last = done.stdout.splitlines()
    result: dict[str, Any] = json.loads(last)
    return "\n".join(lines), result


def test_steps_stand_beside_the_bytes_that_must_move_and_the_calls() -> None:
    text, result = run("--sections", "device,step", "--weights", "4")
    lines = [value for name, value in result.items() if name.startswith("step, 4-bit weights, rows: ")]
    assert len(lines) == 2
    for line in lines:
        assert line.keys() == {"ours", "other", "ratio", "limit", "calls"}
        assert line["ratio"] == pytest.approx(line["other"] / line["ours"], abs=0.01)
        assert 0 < line["limit"] < line["ours"]
        assert line["calls"] > 2 * 16  # of two layers
    assert result["bandwidth of a copy (GB per second)"]["ours"] > 0
    assert "[step, 4-bit weights: " in text


@pytest.mark.slow
def test_sections_run() -> None:
    text, result = run("--sections", "events,loop,prefill,segments,bits", "--weights", "16")
    assert "ended with" not in text
    ratios = [name for name, value in result.items() if isinstance(value, dict) and "ratio" in value]
    for section in ("steps that", "closed loop", "prompts,", "segments,", "8 bits", "4 bits"):
        assert any(name.startswith(section) for name in ratios), section
    stalls = [value["ours"] for name, value in result.items() if name.startswith("... stalls")]
    assert len(stalls) == 2


def test_a_section_that_takes_too_long_ends_alone() -> None:
    text, result = run("--sections", "loop,device", "--weights", "16", "--seconds", "2")
    assert "[loop, 16-bit weights: 2 s, ended with -9]" in text
    assert "[device, 16-bit weights: " in text
    assert result["device"]


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("--sections", "stpe", "no section is called stpe: give some of device,step"),
        ("--weights", "16,8", "weights of 8 bits: give 16, 4 or both"),
    ],
)
def test_what_does_not_exist_is_named(option: str, value: str, error: str) -> None:
    asked = subprocess.run([sys.executable, str(PROGRAM), option, value], capture_output=True, text=True)
    assert asked.returncode == 2
    assert error in asked.stderr
