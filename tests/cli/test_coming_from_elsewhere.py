"""docs/coming-from-*.md of other libraries: each line of their tables is tried on this side.

A command or its options are parsed, with their values; an expression of Python is evaluated, where `model`, `cache` and
what else is in `names_for` are there. What is in the first column is looked for where its library is installed.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import pytest

import mlx_kv
from mlx_kv.cli.main import command as group

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = ("llama-cpp", "kvpress", "transformers")
LEAST_ROWS = {"llama-cpp": 35, "kvpress": 25, "transformers": 28}
COMMANDS = {"The cache": "serve", "The server": "serve", "Drafts": "serve"}  # of options alone, by heading


def rows(page: str) -> list[tuple[str, str, str]]:
    """The heading, and the first two cells, of every line of the tables of a page."""
    found, heading = [], ""
    for line in (DOCS / f"coming-from-{page}.md").read_text().splitlines():
        heading = line[3:] if line.startswith("## ") else heading
        if line.startswith("| ") and not line.startswith("| ---"):
            theirs, ours, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            if ours != "here":
                found.append((heading, theirs, ours))
    return found


LINES = [(page, *row) for page in PAGES for row in rows(page)]


def parse(name: str, words: list[str]) -> None:
    """Raises click's error where a command has no such option, or not with this value."""
    command = group.commands[name]
    context = click.Context(command, info_name=name)
    given, left, _ = command.make_parser(context).parse_args(args=list(words))
    assert not left, left
    for param in command.params:
        if param.name in given:
            param.process_value(context, given[param.name])


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What expressions may name: all that is public, a model that has read a few tokens; and files for options."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build/adapters").mkdir(parents=True)
    for file in ("key.pem", "cert.pem", "answer.gbnf", "answer.json"):
        (tmp_path / file).touch()
    made: dict[str, Any] = {name: getattr(mlx_kv, name) for name in mlx_kv.__all__}
    model, tokenizer = mlx_kv.load(mlx_kv.model_path("reference"))
    keys = values = mx.random.normal((1, 2, 5, 64))
    cache = mlx_kv.KVCache()
    cache.update_and_fetch(keys, values)
    caches = mlx_kv.make_prompt_cache(model)
    model(mx.array([[1, 2, 3, 4, 5]]), cache=caches)
    path = tmp_path / "caches.safetensors"
    mlx_kv.save_prompt_cache(path, caches)
    of_text = {"model": model, "tokenizer": tokenizer, "prompt": [1, 2, 3], "caches": caches}
    return made | of_text | {"cache": cache, "keys": keys, "values": values, "path": path}


def test_there_is_a_line_for_each_of_them() -> None:
    assert sorted(page.name for page in DOCS.glob("coming-from-*.md")) == sorted(
        f"coming-from-{page}.md" for page in (*PAGES, "mlx-lm")
    )
    for page in PAGES:
        assert len(rows(page)) >= LEAST_ROWS[page], page
        theirs = [left for _, left, _ in rows(page)]
        assert len(set(theirs)) == len(theirs)


@pytest.mark.parametrize(("page", "heading", "theirs", "ours"), LINES, ids=[f"{row[0]}: {row[2]}" for row in LINES])
def test_each_line_works_here(page: str, heading: str, theirs: str, ours: str, names: dict[str, Any]) -> None:
    spans = re.findall(r"`([^`]+)`", ours)
    assert ours == "none" or ours == f"`{spans[0]}`", "one span of code, which can be tried"
    for span in spans:
        words = shlex.split(span) if span.startswith(("mlx-kv ", "--")) else []
        if span.startswith("mlx-kv "):
            parse(words[1], words[2:])
        elif words:
            parse(COMMANDS[heading], words)
        else:
            found = eval(span, {"__builtins__": {"isinstance": isinstance, "len": len}}, names)
            if isinstance(found, mlx_kv.CachePolicy):
                mlx_kv.make_prompt_cache(names["model"], found)
            if isinstance(found, Iterator):
                assert list(found)


@pytest.mark.parametrize("page", PAGES)
def test_options_and_settings_in_the_text_exist(page: str) -> None:
    """Beside the tables: in notes, where our own words stand."""
    text = (DOCS / f"coming-from-{page}.md").read_text()
    notes = [line.strip("|").split("|")[2] for line in text.splitlines() if line.startswith("| ")]
    spans = [span for note in notes for span in re.findall(r"`([^`]+)`", note)]
    ours = {name: {word for param in command.params for word in param.opts} for name, command in group.commands.items()}
    for span in spans:
        words = span.split()
        if words[0] == "mlx-kv":
            assert {word for word in words[2:] if word.startswith("--")} <= ours[words[1]], span
        elif words[0].startswith("--"):
            assert words[0] in set.union(*ours.values()), span


def test_names_of_transformers_are_in_its_source() -> None:
    found = importlib.util.find_spec("transformers")
    assert found is not None
    assert found.submodule_search_locations
    source = (Path(found.submodule_search_locations[0]) / "cache_utils.py").read_text()
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    for heading, theirs, _ in rows("transformers"):
        if heading in ("Classes", "Methods"):
            name, _, method = theirs.strip("`").partition(".")
            assert name in classes, theirs
            methods = {node.name for node in classes[name].body if isinstance(node, ast.FunctionDef)}
            assert not method or method in methods, theirs
