"""The files of constraints pin all that pyproject.toml asks for, within its ranges, and say nothing of its source."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.append(str(Path(__file__).parent.parent / "tools"))

import constraints
import pythons

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WRITTEN = {file: (ROOT / file).read_text(encoding="utf-8") for file in constraints.files()}
PIN = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*==\d[\w.!]*")  # no host, no path, no marker


def pins(text: str) -> dict[str, str]:
    """Versions by names."""
    found = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in found if not PIN.fullmatch(line)] == []
    return dict(line.split("==") for line in found)  # type: ignore[misc]


def requirements() -> Iterator[tuple[str, Requirement]]:
    """What each file is to pin."""
    for file, extras in constraints.files().items():
        asked = {
            *PROJECT["dependencies"],
            *(each for name in extras for each in PROJECT["optional-dependencies"][name]),
        }
        yield from ((file, Requirement(each)) for each in sorted(asked))


@pytest.mark.parametrize(("file", "asked"), list(requirements()), ids=str)
def test_a_requirement_is_pinned_within_its_range(file: str, asked: Requirement) -> None:
    pinned = pins(WRITTEN[file])[canonicalize_name(asked.name)]
    assert asked.specifier.contains(pinned), f"{pinned}: make constraints"


def test_every_extra_is_in_a_file() -> None:
    assert set().union(*constraints.files().values()) == set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("file", WRITTEN)
def test_no_address_is_written(file: str) -> None:
    assert not re.search(r"//|index|@|\bfile:|/\w+/", "\n".join(WRITTEN[file].splitlines()[3:]))
    assert "mlx-kv" not in pins(WRITTEN[file])


def installed(name: str, version: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "version": version}, "download_info": {"url": "https://somewhere/x.whl"}}


def test_pins_are_those_of_a_report() -> None:
    report = {"install": [installed("Zoo_Keeper", "2"), installed("torch", "2.1+cpu"), installed("mlx-kv", "0.2.0")]}
    written = constraints.text("constraints.txt", {"cpu"}, report)
    assert pins(written) == {"torch": "2.1", "zoo-keeper": "2"}
    assert "somewhere" not in written


# --- make pythons --------------------------------------------------------------------------------------------------


def test_pythons_are_those_of_the_classifiers() -> None:
    assert pythons.supported()[0] == PROJECT["requires-python"].removeprefix(">=")
    assert len(pythons.supported()) == len(set(pythons.supported())) >= 3


def python(path: Path, says: str, code: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {says}\nexit {code}\n")
    path.chmod(0o755)


def test_a_python_that_only_seems_to_be_one_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shims of pyenv are on the PATH for versions that it has and does not give."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert pythons.python_of("3.99") is None
    python(tmp_path / "bin" / "python3.99", "3.99", code=127)
    assert pythons.python_of("3.99") is None
    python(tmp_path / "pyenv" / "versions" / "3.99.1" / "bin" / "python3.99", "3.98")
    assert pythons.python_of("3.99") is None
    there = tmp_path / "pyenv" / "versions" / "3.99.0" / "bin" / "python3.99"
    python(there, "3.99")
    assert pythons.python_of("3.99") == str(there)
