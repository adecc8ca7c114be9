"""docs/coming-from-mlx-lm.md is whole and right: every option, class and function of mlx-lm has its row, and what a row
names is there, on its side.

mlx-lm's options are read from its argument parsers, its classes and functions from its modules.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import click
import mlx_lm.models.cache as stock
import pytest

import mlx_kv
from mlx_kv.cli.main import command as group

PAGE = (Path(__file__).parent.parent.parent / "docs" / "coming-from-mlx-lm.md").read_text()
STOCK_LOOPS = importlib.import_module("mlx_lm.generate")


def table(heading: str) -> list[list[str]]:
    """The cells of the rows below a heading, up to the next."""
    section = re.split(r"^#+ ", PAGE.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.M)[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\| .*`.*\|$", section, re.M)]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# --- options ------------------------------------------------------------------------------------------------------


def parser_of_the_server(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """It is made inside of the server's main, and nowhere else."""
    made: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser) -> None:
        made.append(parser)
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module("mlx_lm.server").main()
    return made[0]


def in_words(default: Any) -> str:
    return "none" if default in (None, (), "") else "off" if default is False else f"`{default}`"


def our_default(option: click.Option) -> str:
    """What click fills in, or where the library does, what the help says."""
    if option.is_flag:
        return "off"
    if "[default: the model's" in (option.help or ""):
        return "the model's"
    said = re.search(r"\[default: ([\w.]+)[],;]", option.help or "")
    value = option.default
    return f"`{said[1]}`" if said else in_words(None if "UNSET" in repr(value) else value)


def shared_defaults(counterparts: dict[str, argparse.ArgumentParser]) -> dict[tuple[str, str], tuple[str, str]]:
    """Of each option that a command of ours and its counterpart in mlx-lm share: mlx-lm's default and ours."""
    found = {}
    for name, parser in counterparts.items():
        theirs = {word: action for action in parser._actions for word in action.option_strings if word[:2] == "--"}
        for param in group.commands[name].params:
            for option in set(param.opts) & set(theirs) - {"--help"}:
                assert isinstance(param, click.Option)
                found[name, option] = in_words(theirs[option].default), our_default(param)
    return found


@pytest.fixture
def counterparts(monkeypatch: pytest.MonkeyPatch) -> dict[str, argparse.ArgumentParser]:
    """Of each command of ours, the parser of mlx-lm's."""
    return {
        "generate": STOCK_LOOPS.setup_arg_parser(),
        "chat": importlib.import_module("mlx_lm.chat").setup_arg_parser(),
        "cache": importlib.import_module("mlx_lm.cache_prompt").setup_arg_parser(),
        "serve": parser_of_the_server(monkeypatch),
    }


def test_defaults_are_as_the_table_says(counterparts: dict[str, argparse.ArgumentParser]) -> None:
    documented = {}
    for option, commands, theirs, ours, _note in table("Options of the same name"):
        for name in commands.split(", "):
            documented[name, named(option)[0]] = (theirs, ours)
    shared = shared_defaults(counterparts)
    assert len(shared) > 20
    assert documented == shared


def test_every_option_of_mlx_lm_has_its_row(counterparts: dict[str, argparse.ArgumentParser]) -> None:
    rows = [*table("Options of the same name"), *table("Options of another name, or of none")]
    documented = [(name, option) for row in rows for name in row[1].split(", ") for option in named(row[0])]
    theirs = {
        (name, next(word for word in action.option_strings if word.startswith("--")))
        for name, parser in counterparts.items()
        for action in parser._actions
    }
    assert sorted(documented) == sorted(theirs - {(name, "--help") for name in counterparts})


def test_options_of_ours_that_are_named_exist() -> None:
    ours = {name: {word for param in command.params for word in param.opts} for name, command in group.commands.items()}
    for _option, commands, here, *_note in table("Options of another name, or of none"):
        for name in commands.split(", "):
            assert here == "none" or set(named(here)) <= ours[name], here
    everywhere = set.union(*ours.values())
    assert {word.partition(" ")[0] for word in re.findall(r"`(--[^`]+)`", PAGE)} - everywhere == {
        option for row in table("Options of another name, or of none") for option in named(row[0])
    } - everywhere
    assert set(re.findall(r"`mlx-kv (\w+)", PAGE)) <= set(ours)


# --- classes and functions ----------------------------------------------------------------------------------------


def public(module: Any, kind: Any) -> set[str]:
    """What a module defines itself, under a name without an underscore."""
    found = vars(module).items()
    return {name for name, value in found if kind(value) and value.__module__ == module.__name__ and name[0] != "_"}


def check_ours(cell: str) -> None:
    """Each name in a cell is public here, or an attribute of what is."""
    assert cell in ("none", "stays mlx-lm's") or named(cell), cell
    for name in named(cell):
        functools.reduce(getattr, name.removeprefix("mlx_kv.").split("."), mlx_kv)
        assert name.removeprefix("mlx_kv.").split(".")[0] in mlx_kv.__all__


def test_every_class_has_its_row() -> None:
    rows = table("Class by class")
    assert sorted(name for row in rows for name in named(row[0])) == sorted(public(stock, inspect.isclass))
    for theirs, ours, _note in rows:
        check_ours(ours)
        for name in set(named(theirs)) & set(mlx_kv.__all__) - {"KVCache"}:
            theirs_take = list(inspect.signature(getattr(stock, name)).parameters)
            assert list(inspect.signature(getattr(mlx_kv, name)).parameters)[: len(theirs_take)] == theirs_take


def test_every_function_has_its_row() -> None:
    rows = table("Function by function")
    functions = {name for row in rows for name in named(row[0])}
    of_caches, of_loops = public(stock, inspect.isfunction), public(STOCK_LOOPS, callable)
    assert of_caches <= functions <= of_caches | of_loops
    assert {name for name in of_loops if "generate" in name.lower()} - {"BatchGenerator"} <= functions
    for _theirs, ours, _note in rows:
        check_ours(ours)
