"""Parts of `make upstream`: bounds that are left out, names that are gone, what it deletes, and what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

sys.path.append(str(Path(__file__).parent.parent / "tools"))

import upstream


@pytest.mark.parametrize(
    ("asked", "newest"),
    [
        ("mlx[cpu]>=0.32.2,<0.33", "mlx[cpu]>=0.32.2"),
        ("torch==2.13.0", "torch"),
        ("a~=1.2,!=1.3,>1.1", "a!=1.3,>1.1"),
        ("mkl>=2025,<2027; sys_platform == 'linux'", 'mkl>=2025; sys_platform == "linux"'),
    ],
)
def test_upper_bounds_are_left_out(asked: str, newest: str) -> None:
    assert upstream.without_upper_bounds(Requirement(asked)) == newest


def test_packages_beyond_the_ranges_are_named() -> None:
    asked = upstream.requirements()
    assert set(upstream.WATCHED) <= asked.keys()
    versions = {"mlx-lm": "99.0rc1", "click": "8.1.0", "not-ours": "1"}
    assert upstream.beyond(versions) == {"mlx-lm": str(asked["mlx-lm"].specifier)}


def test_names_are_found_wherever_they_are_imported() -> None:
    source = """
from mlx_lm.models import cache as stock
from mlx_kv.cache import rows
def late():
    from mlx_lm.utils import load_model
    return stock.KVCache(rows.One), load_model.__doc__
"""
    assert set(upstream.names_in(source)) == {
        "mlx_lm.models.cache",
        "mlx_lm.models.cache.KVCache",
        "mlx_lm.utils.load_model",
        "mlx_lm.utils.load_model.__doc__",
    }


def test_names_that_are_gone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["mlx_lm.generate.TextStateMachine.split", "mlx_lm.models.cache.KVCache", "mlx_lm.tool_parsers.json_tools"]
    gone = ["mlx_lm.generate.TextStateMachine.cut", "mlx_lm.models.cache.Lost", "mlx_lm.lost.name"]
    monkeypatch.setattr(upstream, "names_used", lambda: [*names, *gone])
    assert upstream.names_gone(Path(sys.executable)) == gone


def test_only_its_own_environment_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "run", lambda *command: None)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit, match="other is no environment of this tool: move it elsewhere"):
        upstream.make_environment(other)
    assert (other / "thesis.txt").exists()
    own = tmp_path / "build" / "upstream"
    upstream.make_environment(own)
    (own / "old").touch()
    assert upstream.make_environment(own) == own / "bin" / "python"
    assert [path.name for path in own.iterdir()] == [upstream.MARK]


def fake_pytest(folder: Path, output: str, code: int) -> Path:
    program = folder / "python"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {code}\n")
    program.chmod(0o755)
    return program


OUTPUT = """..F.
FAILED tests/a/test_b.py::test_c[x - y] - AssertionError: no - never
ERROR tests/a/test_d.py
1 failed, 12 passed, 1 error in 3.1s"""


@pytest.mark.parametrize(
    ("output", "code", "gone", "status"),
    [("12 passed in 3s", 0, [], 0), ("12 passed in 3s", 0, ["mlx_lm.lost"], 1), (OUTPUT, 1, [], 1), ("", 5, [], 1)],
)
def test_what_broke_is_said_with_its_versions(
    output: str,
    code: int,
    gone: list[str],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    versions = {"mlx": "0.33.0", "mlx-lm": "0.33.1", "mlx-vlm": "0.7.10"}
    monkeypatch.setattr(upstream, "make_environment", lambda folder: fake_pytest(tmp_path, output, code))
    monkeypatch.setattr(upstream, "install", lambda python: versions)
    monkeypatch.setattr(upstream, "names_gone", lambda python: gone)
    assert upstream.main(["tests/a"]) == status
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert answer["versions"] == versions
    assert "mlx-lm" in answer["beyond"]
    assert "mlx-vlm" not in answer["beyond"]
    assert answer["gone"] == gone
    assert answer["passed"] == (12 if output else 0)
    broken = ["tests/a/test_b.py::test_c[x - y] - AssertionError: no - never", "tests/a/test_d.py"]
    assert answer["broken"] == (broken if output == OUTPUT else [])
    assert "with mlx 0.33.0, mlx-lm 0.33.1, mlx-vlm 0.7.10" in said.err
