"""How many operations a step launches in each layer, by kind of cache: no more than here, and as few as mlx-lm's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import operations

# What a kind of cache may launch more than another one.
MORE = {
    "one row": ("mlx-lm, one row", 0),
    "rows of one length": ("mlx-lm, one row", 0),
    "rows of different lengths": ("mlx-lm, rows of different lengths", 0),
    "drafts of 4 tokens": ("rows of different lengths", 0),
    "a budget": ("rows of different lengths", 0),
    "a budget, by attention": ("rows of different lengths", 0),
    "a window": ("mlx-lm, a window", 0),
    # As on CUDA, where mlx-lm's slices of buffers have no kernel: weights of 0 for slots that are not used.
    "8 bits, one row": ("mlx-lm, 8 bits, one row", 1),
    "8 bits": ("mlx-lm, 8 bits, one row", 2),  # rows of different lengths need a mask
    "4 bits": ("8 bits", 0),
    "4 bits, newest as they came": ("4 bits", 7),  # a ring is written, and read by products of its own
    "segments": ("rows of different lengths", 12),
    "segments, drafts of 4 tokens": ("drafts of 4 tokens", 12),
    "segments, 8 bits": ("8 bits", 12),
    "segments of all rows but one": ("rows of different lengths", 16),  # and two buffers
}


@pytest.fixture(scope="module")
def counts() -> dict[str, int]:
    """From a process of its own: where another test has loaded a llama, its attention is that for a CPU."""
    printed = subprocess.run([sys.executable, operations.__file__], capture_output=True, text=True, check=True).stdout
    result: dict[str, int] = json.loads(printed.splitlines()[-1])["counts"]
    return result


@pytest.mark.parametrize("case", MORE)
def test_a_step_launches_few_operations(case: str, counts: dict[str, int]) -> None:
    other, more = MORE[case]
    assert 10 < counts[case] <= counts[other] + more


def test_every_case_has_a_limit() -> None:
    assert MORE.keys() == operations.CASES.keys()


def test_each_operation_counts_once_and_views_do_not() -> None:
    x, y = mx.ones((4, 4)), mx.ones((4, 4))
    mx.eval(x, y)
    counted = operations.operations([mx.concatenate([x, y, x]), (x @ y)[1:].reshape(-1), x.T])
    assert counted == {"Concatenate": 3, "Matmul": 1}


def test_fused_calls_count_as_one() -> None:
    x = mx.ones((1, 2, 3, 8))
    mx.eval(x)
    with operations.as_on_a_gpu():
        attended = mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0)
        assert operations.operations([mx.fast.rope(attended, 8, traditional=False, base=1e4, scale=1.0, offset=3)]) == {
            operations.FUSED: 2
        }
    assert operations.operations([mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0)]).total() > 1
