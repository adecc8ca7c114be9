"""What `make check`, `make test` and `make test-all` run of the cases of a test."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from effort import covering

ROOT = Path(__file__).parent.parent
CASES = """
import pytest

@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("rows", [1, 2])
def test_product(bits, rows): ...

@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4])
def test_slow(bits): ...

@pytest.mark.parametrize("bits", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_partly_slow(bits): ...

class TestOne:
    def test_plain(self): ...
"""


def test_a_product_is_covered_by_as_many_cases_as_its_longest_list() -> None:
    cases = [{"a": a, "b": b} for a, b in itertools.product(range(3), "wxyz")]
    chosen = [cases[index] for index in covering(cases)]
    assert len(chosen) == 4
    assert {case["a"] for case in chosen} == {0, 1, 2}
    assert {case["b"] for case in chosen} == set("wxyz")
    assert covering([{}]) == [0]
    assert covering([]) == []


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        pytest.param([], {"product": 6, "slow": 2, "partly_slow": 2, "plain": 1}, marks=pytest.mark.slow),
        (["--cover"], {"product": 3, "partly_slow": 1, "plain": 1}),
        pytest.param(["--quick"], {"product": 1, "partly_slow": 1, "plain": 1}, marks=pytest.mark.slow),
    ],
)
def test_each_tier_has_its_cases(options: list[str], counts: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    for name in ("conftest.py", "effort.py"):
        (tmp_path / name).write_text((ROOT / "tests" / name).read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    chosen_length\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr
    assert Counter(re.findall(r"::test_(\w+)", said.stdout)) == counts
