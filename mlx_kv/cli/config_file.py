"""`--config FILE`: options from a TOML file, checked as a whole before a command runs.

    host = "0.0.0.0"
    max-batch-size = 32

    [cache]               # sections may group options, under any name
    kv_bits = "8,4"

Keys are names of options, with - or _. The command line wins over environment variables, these over the file, and the
file over defaults.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from mlx_kv.cli.help import Option
from mlx_kv.cli.options import EXISTING_FILE, Number, SettingOption, check_removed
from mlx_kv.settings import SettingError, check_setting, shown


def add_config_option(command: click.Command) -> None:
    """Adds --config to a command."""

    def read(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
        if path is not None:
            ctx.default_map = read_config_file(path, ctx)

    option = Option(
        ["--config"],
        summary="TOML file with options by name.",
        type=EXISTING_FILE,
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=read,
        help="TOML file with options by name; the command line wins over it.",
    )
    command.params.append(option)


def read_config_file(path: Path, ctx: click.Context) -> dict[str, Any]:
    """The values of a command's parameters in a configuration file.

    Raises:
        click.UsageError: it cannot be read, is no TOML, or has a key or a value that the command does not take.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # no UTF-8, no TOML
        raise click.UsageError(f"{path} is not TOML: {error}") from error
    options = dict(_options(ctx.command))
    found: dict[str, Any] = {}
    for key, value in _entries(content):
        option = options.get(key.replace("_", "-"))
        if option is None or option.name is None:
            check_removed(f"--{key.replace('_', '-')}", f"{path}: ")
            command = f"mlx-kv {ctx.info_name}"
            raise click.UsageError(f"{path}: {key} is not an option of {command}: see {command} --help")
        if option.name in found:
            raise click.UsageError(f"{path}: {key} is given twice: leave out one of them")
        found[option.name] = _checked(f"{path}: {key}", key, value, option, ctx)
    return found


def _options(command: click.Command) -> Iterator[tuple[str, click.Option]]:
    """The options of a command that take a value of their own, by name without dashes."""
    for param in command.params:
        if isinstance(param, click.Option) and not param.is_eager and (not param.is_flag or param.is_bool_flag):
            yield from ((name[2:], param) for name in param.opts if name.startswith("--"))


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values, those of sections included."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _entries(value)
        else:
            yield key, value


def _checked(where: str, key: str, value: Any, option: click.Option, ctx: click.Context) -> Any:
    """The value for click, which reads it once more.

    Raises:
        click.UsageError: it is of another type, or the option refuses it.
    """
    if option.is_flag or option.type is click.BOOL:
        if not isinstance(value, bool):
            raise click.UsageError(f"{where} is {shown(value)}: give true or false")
        return value
    if option.multiple:
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise click.UsageError(f"{where} is {shown(value)}: give a text, or an array of texts")
    elif isinstance(option, SettingOption) and isinstance(option.type, Number):
        try:
            check_setting(key, value, option.described)
        except SettingError as error:
            raise click.UsageError(f"{where.removesuffix(key)}{error}") from None
    else:
        value = _as_text(where, value)
    try:
        option.type_cast_value(ctx, value)
    except click.BadParameter as error:
        raise click.UsageError(f"{where} is {shown(value)}: {error.message}") from None
    return value


def _as_text(where: str, value: Any) -> str:
    """The value as on the command line; an array is words with commas between them."""
    if isinstance(value, list) and all(isinstance(each, str | int) and not isinstance(each, bool) for each in value):
        return ",".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise click.UsageError(f"{where} is {shown(value)}: give a text or a number")
    return str(value)
