"""The house as it is meant: imports go downwards, privates stay in their rooms, and it stays small enough to read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from house_rules import (
    MOST_CODE_LINES,
    MOST_FILES,
    MOST_IN_ROOT,
    MOST_WIRING,
    in_root,
    privates_across_rooms,
    privates_of_mlx_lm,
    too_long,
)

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mlx_kv"

sys.path.append(str(ROOT / "tools"))

import codelines  # noqa: E402


def sources(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.py"))}


# --- what is imported -------------------------------------------------------------------------------------------------


def linted(root: Path) -> subprocess.CompletedProcess[str]:
    """What import-linter says of the package in a folder, by the contracts in pyproject.toml."""
    call = "import sys; from importlinter.cli import lint_imports as lint; sys.exit(lint(sys.argv[1], no_cache=True))"
    command = [sys.executable, "-c", call, str(ROOT / "pyproject.toml")]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_imports_keep_the_contracts() -> None:
    said = linted(ROOT)
    assert said.returncode == 0, said.stdout


@pytest.mark.parametrize(
    ("path", "line", "contract"),
    [
        ("cache/mask.py", "from mlx_kv.files import tensor_files", "Rooms import downwards only"),
        ("server/rows.py", "import mlx_kv.cli.main", "Rooms import downwards only"),
        ("plots.py", "def lazily():\n    from mlx_kv import blas", "Rooms import downwards only"),
        (
            "cache/growth.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mlx_kv.cache.kv_cache import KVCache",
            "Nothing imports in a circle",
        ),
        ("cache/growth.py", "from mlx_kv.cache.layout import Row", "Parts of the cache import downwards only"),
        ("cache/mask.py", "import mlx_lm.models.base", "The cache knows nothing of mlx-lm"),
        ("attic/__init__.py", "", "Rooms import downwards only"),
    ],
)
@pytest.mark.slow
def test_each_contract_can_be_broken(path: str, line: str, contract: str, tmp_path: Path) -> None:
    for name, source in (sources(PACKAGE)).items():
        copied = tmp_path / "mlx_kv" / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(source)
    planted = tmp_path / "mlx_kv" / path
    planted.parent.mkdir(exist_ok=True)
    with planted.open("a") as file:
        file.write(f"\n{line}\n")
    said = linted(tmp_path)
    assert said.returncode == 1
    assert contract in said.stdout.partition("Broken contracts")[2] or "missing layers" in said.stdout


# --- privates ---------------------------------------------------------------------------------------------------------


def test_no_private_attribute_is_read_across_rooms() -> None:
    assert privates_across_rooms(sources(PACKAGE)) == []


def test_no_private_name_of_mlx_lm_is_used() -> None:
    assert privates_of_mlx_lm(sources(PACKAGE)) == []


MADE = {"cache/kv_cache.py": "class KVCache:\n    def __init__(self):\n        self._rows = ()\n\ndef _helper(): ..."}


@pytest.mark.parametrize(
    "source",
    [
        "def size(cache):\n    return cache._rows",
        "def size(cache):\n    cache._rows = ()",
        "from mlx_kv.cache.kv_cache import _helper",
        "def size(cache):\n    return getattr(cache, '_rows', None)",
    ],
)
def test_a_private_of_another_room_is_found(source: str) -> None:
    assert len(privates_across_rooms({**MADE, "server/memory.py": source})) == 1
    assert privates_across_rooms({**MADE, "cache/rows.py": source}) == []


def test_what_a_room_makes_itself_is_its_own() -> None:
    own = "class Row:\n    def __init__(self, other):\n        self._rows = other._rows"
    assert privates_across_rooms({**MADE, "server/memory.py": own}) == []


@pytest.mark.parametrize(
    "source", ["def name(engine):\n    return engine._generation_batch", "from mlx_lm.utils import _get_classes"]
)
def test_a_private_of_mlx_lms_is_found(source: str) -> None:
    assert len(privates_of_mlx_lm({**MADE, "generation/engine.py": source, "mlxlm/probe.py": source})) == 2


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["mlx_kv", "tests"])
def test_files_can_be_read_in_one_sitting(folder: str) -> None:
    assert too_long(sources(ROOT / folder)) == []


def test_the_root_holds_a_handful_of_files() -> None:
    assert len(in_root(sources(PACKAGE))) <= MOST_IN_ROOT


def test_what_is_too_long_is_found() -> None:
    assert too_long({"a.py": "x = 1\n" * 1000}) == []
    assert too_long({"a.py": "x = 1\n" * 1001}) == ["a.py: 1001 lines"]
    assert in_root({"a.py": "", "cache/b.py": ""}) == ["a.py"]


def test_the_package_stays_as_small_as_it_is() -> None:
    count = sum(codelines.count_folder(PACKAGE).values(), codelines.Count())
    assert count.lines <= MOST_CODE_LINES
    assert count.files <= MOST_FILES
    assert count.wiring <= MOST_WIRING


COUNTED = '''"""Two lines
of docstring."""

# a comment
import os


@cached
def load(  # three lines of signature
    path, text="""a
b"""
):
    """What it does."""
    return """no docstring,

but three lines"""


class Empty:
    """Of one line."""
'''


def test_comments_docstrings_and_blank_lines_are_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert codelines.count_source(COUNTED) == codelines.Count(lines=10, files=1, imports=1, signatures=4)
    (tmp_path / "cache" / "layout").mkdir(parents=True)
    for name, text in (("a.py", "x = 1\n"), ("cache/b.py", COUNTED), ("cache/layout/c.py", "\n")):
        (tmp_path / name).write_text(text)
    assert codelines.main([str(tmp_path)]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert said[1:] == [
        [".", "1", "1", "0", "0", "0.0%"],
        ["cache", "10", "2", "1", "4", "50.0%"],
        ["total", "11", "3", "1", "4", "45.5%"],
    ]


def test_a_folder_without_sources_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        codelines.main([str(tmp_path)])
    assert f"{tmp_path} has no Python files" in capsys.readouterr().err
