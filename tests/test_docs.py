"""docs/ is whole: every public name has its place in the API reference, and every link its file and heading.

The build of the site (`make docs`) checks links, too; this is what can be said without it.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from pages import blocks

import mlx_kv
from mlx_kv.cli.main import command as group

ROOT = Path(__file__).parent.parent
REFERENCE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
CHANGELOG, SECURITY = ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", SECURITY])


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_every_public_name_is_in_the_reference() -> None:
    named = re.findall(r"^::: mlx_kv\.(\w+)$", REFERENCE, re.M)
    packages = {path.parent.name for path in Path(mlx_kv.__file__).parent.glob("*/__init__.py")}
    assert sorted(named) == sorted([*mlx_kv.__all__, *packages])


def test_what_programs_of_pages_import_is_in_the_reference() -> None:
    named = set(re.findall(r"^::: (mlx_kv\.\S+)$", REFERENCE, re.M))
    for page in PAGES:
        if page.name == "architecture.md":  # is for those who change the modules
            continue
        for module, names in re.findall(r"^from (mlx_kv\.[\w.]+) import (.+)$", page.read_text(), re.M):
            told = {f"{module}.{name.strip()}" for name in names.split(",")}
            assert {name for name in told - named if name.rpartition(".")[2] not in mlx_kv.__all__} == set(), page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{target}#{anchor}"


GROUPS = {"mlx_kv.scores", "mlx_kv.codecs", "mlx_kv.drafters"}  # of entry points


def exists(name: str) -> None:
    """Fails unless this is a module, or an attribute of one."""
    found: Any = mlx_kv
    for part in name.split(".")[1:]:
        found = getattr(found, part, None) or importlib.import_module(f"{found.__name__}.{part}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_tests_that_a_page_speaks_of_exist(page: Path) -> None:
    text, was = page.read_text(), "| it was | it is |"
    if was in text:  # names that are gone
        text = re.sub(r"^\|.*?\|", "", text, flags=re.M)
    for name in set(re.findall(r"\bmlx_kv(?:\.[A-Za-z_]\w*)+", text)) - GROUPS:
        exists(name)
    for path in re.findall(r"\btests/[\w/]+\.py", text):
        assert (ROOT / path).is_file(), path


def parsed(line: str) -> str | None:
    """The command that a line calls; its parser raises UsageError for options that the command does not have."""
    words = shlex.split(line, comments=True)
    if words[:1] != ["mlx-kv"] or "[" in line:  # a synopsis
        return None
    with click.Context(group) as context:
        name = " ".join(words[1:3]) if group.get_command(context, " ".join(words[1:3])) else words[1]
        found = group.get_command(context, name)
        assert found is not None, line
        found.make_parser(click.Context(found)).parse_args(words[1 + len(name.split()) :])
    return name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_have_the_options_that_it_uses(page: Path) -> None:
    lines = [line for block in blocks(page.read_text()) for line in block.commands]
    used = {name for line in lines if line.startswith("mlx-kv ") for name in [parsed(line)] if name}
    if page.name == "settings.md":
        assert used >= {"plan", "calibrate", "chat", "serve", "cache", "generate", "batch"}


def test_a_command_that_does_not_exist_is_seen() -> None:
    with pytest.raises(click.UsageError):
        parsed("mlx-kv chat --no-such-option 3")
    with pytest.raises(AssertionError):
        parsed("mlx-kv nothing --kv-bits 8")


def test_the_changelog_has_a_place_for_what_is_to_come_and_this_version_with_a_day() -> None:
    headings = re.findall(r"^## (.+)$", CHANGELOG.read_text(), re.M)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(mlx_kv.__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])
    parts = re.findall(r"^### (.+)$", CHANGELOG.read_text(), re.M)
    assert set(parts) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    upgrades = re.findall(r"^## From .+ to (.+)$", (ROOT / "docs" / "upgrading.md").read_text(), re.M)
    assert mlx_kv.__version__.rpartition(".")[0] in upgrades


def test_every_promise_has_a_test() -> None:
    rows = re.findall(r"^\| (?!promise |---)(.+) \| (.+) \|$", SECURITY.read_text(), re.M)
    assert len(rows) > 15
    for promise, tests in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert named, promise
        for path, name in named:
            tree = ast.parse((ROOT / path).read_text())
            assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}, f"{path}::{name}"
