"""What CI and a release run: the commands of a day's work, on the Pythons that the package says it is for, and an
upload of what tests/test_wheel.py has looked at, which needs no secret. No workflow is run here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import mlx_kv

ROOT = Path(__file__).parent.parent
WORKFLOWS = ROOT / ".github" / "workflows"
CLASSIFIERS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
SUPPORTED = [each.rpartition(" ")[2] for each in CLASSIFIERS if re.search(r"Python :: 3\.\d", each)]


def workflow(name: str) -> dict[Any, Any]:
    told: dict[Any, Any] = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    return told


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def using(job: dict[str, Any], action: str) -> dict[str, Any]:
    """What the one step that uses an action tells it."""
    (step,) = [step for step in job["steps"] if step.get("uses", "").startswith(f"{action}@")]
    told: dict[str, Any] = step.get("with", {})
    return told


@pytest.mark.parametrize("name", sorted(path.name for path in WORKFLOWS.glob("*.yml")))
def test_every_command_is_a_target_of_make_and_every_job_ends(name: str) -> None:
    for job in workflow(name)["jobs"].values():
        assert job["timeout-minutes"] <= 90
        for command in commands(job):
            assert re.fullmatch(r'make [a-z-]+( [A-Z]+=("\$[A-Z_]+"|\w+))?', command)
            target = command.split()[1]
            asked = ["make", "--dry-run", "--always-make", target]
            done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def test_ci_runs_all_on_every_python() -> None:
    jobs = workflow("ci.yml")["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == SUPPORTED
    assert set(commands(jobs["test"])) == {"make generate", "make test", "make test-all", "make lint", "make docs"}
    tiers = {step["run"]: step.get("if") for step in jobs["test"]["steps"] if "run" in step}
    assert tiers["make test-all"] == "matrix.os == 'ubuntu-latest' && matrix.python == '3.11'"
    assert tiers["make test"] == "matrix.os != 'ubuntu-latest' || matrix.python != '3.11'"  # all the others
    assert [command for command, where in tiers.items() if where is None] == ["make generate", "make lint", "make docs"]
    assert using(jobs["wheel"], "actions/setup-python")["python-version"].split() == SUPPORTED
    assert commands(jobs["wheel"]) == ["make pythons ALL=1"]
    assert commands(jobs["fresh"]) == ["make fresh ALL=1"]


def test_a_release_uploads_what_was_built_and_checked() -> None:
    told = workflow("release.yml")
    assert told[True] == {"push": {"tags": ["v*"]}}  # `on` is a boolean in YAML 1.1
    build, tried, publish = (told["jobs"][name] for name in ("build", "try", "publish"))
    (made,) = commands(build)
    assert made == 'make dist TAG="$GITHUB_REF_NAME"'
    assert commands(tried) == ["make pythons ALL=1", "make test-all"]
    assert set(publish["needs"]) == told["jobs"].keys() - {"publish", "announce"}
    assert told["jobs"]["announce"]["needs"] == "publish"
    up, down = using(build, "actions/upload-artifact"), using(publish, "actions/download-artifact")
    assert (up["name"], up["path"]) == (down["name"], down["path"]) == ("dist", "dist/")  # the action's own folder
    assert commands(publish) == []  # nothing is built where the rights are


def test_a_release_has_no_secret() -> None:
    told = workflow("release.yml")
    assert "secrets." not in (WORKFLOWS / "release.yml").read_text(encoding="utf-8")
    assert using(told["jobs"]["publish"], "pypa/gh-action-pypi-publish") == {}
    rights = {name: job.get("permissions", told["permissions"]) for name, job in told["jobs"].items()}
    assert rights.pop("publish") == {"id-token": "write"}
    assert rights.pop("announce") == {"contents": "write"}
    assert set(map(str, rights.values())) == {"{'contents': 'read'}"}


def test_make_dist_builds_once_and_has_the_tests_look_at_that() -> None:
    asked = ["make", "--dry-run", "--no-print-directory", "dist"]  # which make says of itself under another make
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    *_, build, check = done.stdout.splitlines()
    assert build.endswith("-m build --outdir dist .")
    assert check.startswith(f'MLX_KV_DIST="{ROOT}/dist" ')
    assert check.endswith(" -m pytest tests/test_wheel.py")


def test_a_release_is_announced_with_its_part_of_the_changelog(tmp_path: Path) -> None:
    gh = tmp_path / "gh"
    gh.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words; cat > {tmp_path}/notes\n')
    gh.chmod(0o755)
    tag = f"v{mlx_kv.__version__}"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["make", "announce", f"TAG={tag}"], cwd=ROOT, env=os.environ | {"PATH": path}, check=True)
    notes = (tmp_path / "notes").read_text()
    assert re.findall(r"^## \[(.*?)\]", notes, re.M) == [mlx_kv.__version__]
    assert f"](../../blob/{tag}/docs/upgrading.md" in notes
    assert (tmp_path / "words").read_text().startswith(f"release create {tag} --verify-tag")


def test_a_tag_of_another_version_builds_nothing(tmp_path: Path) -> None:
    """The rule itself runs, with the set-up taken as done."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "python").write_text(
        f'#!/bin/sh\n[ "$1" = -m ] && exit 9\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n'
    )
    (binaries / "python").chmod(0o755)
    (tmp_path / ".dev").touch()
    dist = tmp_path / "dist"
    dist.mkdir()
    for tag, says in (("v9.9", "v9.9 is not that of this version"), (f"v{mlx_kv.__version__}", "Error 9")):
        asked = ["make", "-f", ROOT / "Makefile", "-o", tmp_path / ".dev", f"VENV={tmp_path}", f"TAG={tag}", "dist"]
        done = subprocess.run(list(map(str, asked)), cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode != 0
        assert says in done.stderr
        assert dist.exists() == (tag == "v9.9")
