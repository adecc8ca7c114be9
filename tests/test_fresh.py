"""Parts of `make fresh`: what a newcomer has, what is run as it stands, and what is said where no index is reached."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, Block, Shell, commands

sys.path.append(str(ROOT / "tools"))

import fresh


def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else this machine says of packages."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    no_index(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_HOME", str(ROOT))
    return fresh.environment(tmp_path)


def test_a_newcomer_has_three_programs_and_what_every_system_has(told: dict[str, str], tmp_path: Path) -> None:
    assert {name for name in told if not name.startswith(fresh.OF_THE_INDEX)} == {"HOME", "PATH", "LANG"}
    assert told["PIP_NO_INDEX"] == "1"
    assert list(Path(told["HOME"]).iterdir()) == []
    assert {path.name for path in Path(told["PATH"]).iterdir()} == {"python3", "git", "make", *fresh.SYSTEM}
    shell = Shell(tmp_path, told)
    assert shell.run("python3 --version; git --version; make --version").stdout.count("\n") >= 3
    with pytest.raises(AssertionError, match="not found"):
        shell.run("mlx-kv info")


def test_a_program_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "SYSTEM", (*fresh.SYSTEM, "no-such-program"))
    with pytest.raises(SystemExit, match="there is no no-such-program"):
        fresh.programs(tmp_path / "programs")


def test_without_an_index_it_says_why(told: dict[str, str], tmp_path: Path) -> None:
    assert "No matching distribution found for click" in fresh.no_index(Path(sys.executable), tmp_path, told)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "code"), [([], 0), (["--all"], 1)])
def test_without_an_index_nothing_is_tried(
    options: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_index(monkeypatch)
    monkeypatch.setattr(fresh, "try_pages", lambda *_: pytest.fail("it was tried"))
    assert fresh.main(options) == code
    out, err = capsys.readouterr()
    assert list(json.loads(out)) == ["skipped"]
    assert "no package index can be reached, so nothing was tried" in err


class Listed(Shell):
    """Runs nothing."""

    def run(self, line: str) -> Any:
        self.said += f"{line}\n"
        return subprocess.CompletedProcess(line, 0, "", "")


def test_all_commands_of_the_first_pages_run(tmp_path: Path) -> None:
    assert fresh.PAGES[:2] == ("README.md", "docs/generate.md")
    lines = [line for page in fresh.PAGES[:2] for line in commands((ROOT / page).read_text(encoding="utf-8"))]
    shell = Listed(tmp_path, {})
    fresh.run_block(Block("", "commands", "\n".join(lines)), shell)
    run = shell.said.splitlines()
    assert [line for line in lines if line not in run and not line.startswith(("pip", "git clone"))] == []
    (install,) = [line for line in run if line.startswith("pip")]
    assert "--dry-run" in install
    assert install.partition("#")[2].strip() in ("Linux", "")
    assert len(run) == len([line for line in lines if not line.startswith(("pip", "git clone"))]) + 1


def test_the_tests_that_it_runs_are_there() -> None:
    named = [word for word in fresh.SHORT_TEST.split() if not word.startswith("--")]
    assert named
    assert [word for word in named if not (ROOT / word).is_file()] == []
