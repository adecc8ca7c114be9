"""Options of commands, made from dataclasses whose fields describe themselves (`mlx_kv.settings`).

Neither MLX nor what needs it is imported before a command runs.

`--help` fits one screen: common options in sections, two examples; `--help-all` has the rest. `--config FILE` reads
options from a TOML file, checked as a whole before a command runs:

    host = "0.0.0.0"
    max-batch-size = 32

    [cache]               # sections may group options, under any name
    kv_bits = "8,4"

Keys are names of options, with - or _. The command line wins over environment variables, these over the file, and the
file over defaults.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import click

from mlx_kv.cli.output import file_errors, say
from mlx_kv.settings import MOST_TOKENS, Setting, SettingError, check_setting, removed, settings_of, shown

# --- --help -----------------------------------------------------------------------------------------------------------


OPTIONS = "Options"  # the section of options without another one; it is the last
TERM_WIDTH = 30  # columns of names
LINE_WIDTH = 44  # columns beside them, in a terminal of 80
EXAMPLES = 2  # in `--help`


class Option(click.Option):
    """An option in a section of `--help`.

    Attributes:
        section: heading of the section.
        summary: one short line for `--help`, and by default the help; options without one are in `--help-all` only.
    """

    def __init__(self, *arguments: Any, section: str = OPTIONS, summary: str = "", **more: Any) -> None:
        super().__init__(*arguments, **{"help": summary or None, **more})
        self.section, self.summary = section, summary


NO_TABLES: Mapping[str, click.Command] = {}
TABLES = "mlx_kv.tables"  # of a context's `meta`: by kind and name, the values of a command's parameters


class SectionedCommand(click.Command):
    """A command with `--help` of one screen, `--help-all` and `--config`.

    Args:
        tables: the commands whose options are the keys of a configuration file's tables [kind.NAME], by kind.
    """

    def __init__(self, *arguments: Any, tables: Mapping[str, click.Command] = NO_TABLES, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.tables = tables
        config = Option(
            ["--config"],
            summary="TOML file with options by name.",
            type=EXISTING_FILE,
            metavar="FILE",
            is_eager=True,
            expose_value=False,
            callback=self._read_config,
            help="TOML file with options by name; the command line wins over it.",
        )
        help_all = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=self._print_full_help,
            help="Show all options and examples.",
        )
        self.params += [help_all, config]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the common options, the first paragraph of the description, and the first examples."""
        text = inspect.cleandoc(self.help or "").partition("\n\n")[0]
        examples = inspect.cleandoc(self.epilog or "").split("\n\b")[0].splitlines()[: EXAMPLES + 2]
        self._format(ctx, formatter, text, "\n".join(examples), common=True)

    def _read_config(self, ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
        if path is not None:
            ctx.default_map = read_config_file(path, ctx)

    def _print_full_help(self, ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            formatter = ctx.make_formatter()
            text, examples = (inspect.cleandoc(each or "") for each in (self.help, self.epilog))
            self._format(ctx, formatter, text, examples, common=False)
            click.echo(formatter.getvalue().rstrip("\n"))
            ctx.exit()

    def _format(
        self, ctx: click.Context, formatter: click.HelpFormatter, text: str, examples: str, common: bool
    ) -> None:
        self.format_usage(ctx, formatter)
        _paragraph(formatter, text)
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = _brief_record(param, ctx) if common else param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):  # arguments are in the usage
                sections.setdefault(getattr(param, "section", OPTIONS), []).append(record)
        sections[OPTIONS] = sections.pop(OPTIONS)
        # Padded alike, so that the columns of all sections are aligned.
        width = min(TERM_WIDTH, max(len(names) for rows in sections.values() for names, _ in rows))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(names.ljust(width), line) for names, line in rows], TERM_WIDTH)
        _paragraph(formatter, examples)


def _paragraph(formatter: click.HelpFormatter, text: str) -> None:
    if text:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text)


def _brief_record(param: click.Parameter, ctx: click.Context) -> tuple[str, str] | None:
    """Names and one line on an option; None if it is rare. Of several long names it has the first."""
    record = param.get_help_record(ctx)
    if record is None or not isinstance(param, Option):
        return record
    if not param.summary:
        return None
    names, line = record
    for other in [name for name in param.opts if name.startswith("--")][1:]:
        names = names.replace(f", {other}", "")
    default = re.search(r"  \[default: [^];]+", line)
    full = f"{param.summary}{default[0]}]" if default else param.summary
    return names, full if len(full) <= LINE_WIDTH else param.summary


command = functools.partial(click.command, cls=SectionedCommand)
option = functools.partial(click.option, cls=Option)
Command = Callable[..., Any]


# --- options of a dataclass -------------------------------------------------------------------------------------------


def options(
    group: type, parameter: str, *names: str, section: str = "", **changes: Mapping[str, Any]
) -> Callable[[Command], Command]:
    """Adds the options of a dataclass to a command, which receives an instance of it.

    Options that are not given keep the default of their field.

    Args:
        group: the dataclass.
        parameter: of the command, for the instance.
        names: fields that are options here, in the order of `--help`; none: all fields that have an option.
        section: of `--help`, instead of the `SECTION` of the dataclass.
        changes: other attributes of `Setting` for a field.
    """
    described = {name: each for name, each in settings_of(group).items() if each.options}
    chosen = {name: replace(described[name], **changes.get(name, {})) for name in names or described}

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def command(**values: Any) -> Any:
            fields = {}
            for name, each in chosen.items():
                long = next((option for option in each.options if option.startswith("--")), each.options[0])
                value = values.pop(long.lstrip("-").replace("-", "_"))  # as click names the parameter
                if value is not None:
                    fields[name] = value if each.words is None else each.words[value]
            instance = group(**fields)
            return function(**{parameter: instance}, **values)

        decorated: Command = command
        for name, each in reversed(chosen.items()):
            decorated = _parameter(group, name, each, section or getattr(group, "SECTION", OPTIONS))(decorated)
        return decorated

    return decorate


class SettingOption(Option):
    """An option of a field.

    Attributes:
        group, field: the dataclass and the name of its field.
        described: the description of the field.
    """

    def __init__(self, *arguments: Any, group: type, field: str, described: Setting, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.group, self.field, self.described = group, field, described


def _parameter(group: type, name: str, described: Setting, section: str) -> Callable[[Command], Command]:
    if not described.options[0].startswith("-"):
        return click.argument(described.options[0], required=False, metavar=described.metavar)
    text, default = described.help, described.default
    if described.default_text is not None:
        text, default = f"{text}  [default: {described.default_text}]", None
    more: dict[str, Any] = {"envvar": described.environment, "multiple": described.multiple}
    if described.kind is bool:
        more = {"is_flag": True}
    else:
        more |= {"type": type_of(name, described), "metavar": described.metavar}
        if default not in (None, ()):
            words = described.words or {}
            more |= {"default": next((word for word, value in words.items() if value == default), default)}
            more |= {"show_default": True}
    more |= {"section": section, "summary": described.summary}
    named: dict[str, Any] = {"group": group, "field": name, "described": described}
    return click.option(*described.options, cls=SettingOption, help=text, **named, **more)


def type_of(name: str, described: Setting) -> click.ParamType[Any]:
    """How click reads an option."""
    if described.words is not None or described.choices:
        return Word(name, described)
    if described.kind in (int, float):
        return Number(name, described)
    if isinstance(described.kind, click.ParamType):
        return described.kind
    return Parsed(described.kind) if callable(described.kind) and described.kind is not str else click.STRING


class Word(click.Choice[str]):
    """One of the words of a setting."""

    def __init__(self, field: str, described: Setting) -> None:
        super().__init__(list(described.words or described.choices))
        self._field, self._instead = field, described.removed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in self._instead:
            option = self._field if param is None else param.opts[0]
            error = removed(self._field, value, self._instead[value])
            raise click.UsageError(error.render({self._field: option}), ctx)
        return super().convert(value, param, ctx)


class Number(click.ParamType[Any]):
    """A number within the bounds of a setting."""

    name = "number"

    def __init__(self, field: str, described: Setting) -> None:
        self._field, self._described = field, described

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            with contextlib.suppress(ValueError):  # refused below
                value = self._described.kind(value)
        try:
            check_setting(self._field, value, self._described)
        except SettingError as error:
            option = self._field if param is None else param.opts[0]
            raise click.UsageError(error.render({self._field: option}), ctx) from None
        return value


class Parsed(click.ParamType[Any]):
    """A text that a function reads, which raises ValueError for what it refuses."""

    name = "text"

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


# --- types ------------------------------------------------------------------------------------------------------------


class LeadersFile(click.Path):
    """A path on the first of several ranks; it need not exist on the others."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from mlx_kv.ranks.environment import follows

        return self.coerce_path_result(value) if follows() else super().convert(value, param, ctx)


EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
LEADERS_FILE = LeadersFile(exists=True, dir_okay=False, path_type=Path)


def read_bytes(text: str) -> int:
    """A number of bytes, or as mlx-lm writes it, of megabytes or gigabytes: 512MB, 1.5G.

    Raises:
        ValueError: another text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MG]?)B?", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None or (not match[2] and "." in match[1]):
        raise ValueError(f"{text!r} is not a number of bytes: write one, or as in 512MB or 1.5GB.")
    return int(Decimal(match[1]) * {"": 1, "M": 10**6, "G": 10**9}[match[2].upper()])


def read_numbers(text: str, what: str, largest: int = MOST_TOKENS) -> tuple[int, ...]:
    """Whole numbers from 1 up, separated by commas.

    Args:
        what: each is, and the advice, for messages.

    Raises:
        ValueError: another text.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) <= 10 and 1 <= int(word) <= largest):
            raise ValueError(f"{word!r} is not {what}")
    return tuple(map(int, words))


def read_wired_limit(text: str) -> int | str:
    """A number of bytes as of `read_bytes`, or one of the words auto and none.

    Raises:
        ValueError: another text.
    """
    if text in ("auto", "none"):
        return text
    try:
        return read_bytes(text)
    except ValueError as error:
        raise ValueError(f"{str(error).removesuffix('.')}, or auto or none.") from None


json_option = option("--json", "as_json", is_flag=True, section="Output", summary="Print one JSON object.")
plot_option = option(
    "--plot", type=NEW_FILE, metavar="FILE", section="Output", summary="Draw a figure: .png, .svg or .pdf."
)


def listed(values: tuple[str, ...]) -> list[str]:
    """The values of an option that may be repeated and takes several, separated by commas."""
    return [each.strip() for value in values for each in value.split(",") if each.strip()]


def not_needed(option: str, why: str) -> Callable[[Command], Command]:
    """An option of mlx-lm's that changes nothing here: it is accepted with a note."""

    def note(ctx: click.Context, param: click.Parameter, value: int | None) -> None:
        if value is not None:
            say(f"note: {option} has no effect: {why}")

    return click.option(option, type=int, expose_value=False, callback=note, hidden=True)


# --- errors and sources -----------------------------------------------------------------------------------------------


def option_names(command: click.Command) -> dict[str, str]:
    """The options of a command by the settings that they set."""
    named = {}
    for param in command.params:
        if isinstance(param, click.Option) and param.name and not (param.is_flag and not param.is_bool_flag):
            named[param.field if isinstance(param, SettingOption) else param.name] = param.opts[0]
    return named


def message_of(error: ValueError, command: click.Command) -> str:
    """The message of an error, with the options of a command for the names of settings."""
    return error.render(option_names(command)) if isinstance(error, SettingError) else str(error)


def given_options(group: type) -> dict[str, str]:
    """The options of a group, by field, that the command line or a configuration file gives to the running command."""
    context = click.get_current_context(silent=True)
    if context is None:
        return {}
    sources = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.DEFAULT_MAP)
    return {
        param.field: param.opts[0]
        for param in context.command.params
        if isinstance(param, SettingOption) and param.group is group
        if context.get_parameter_source(str(param.name)) in sources
    }


# Of earlier versions, with the way on.
REMOVED_COMMANDS = {
    "cache diff": "a server reports where a prompt differs from a cached one, in /memory and with --log-level INFO",
    "eval": "run python -m benchmarks.eval in a checkout; mlx-kv calibrate reports the answers that a budget keeps",
    "models": "hf cache ls lists downloaded models, mlx-kv info the bundled ones, and mlx-kv plan --model MODEL tells "
    "what their caches take",
}
REMOVED_OPTIONS: dict[str, str] = {
    "--loss-text": "mlx-kv calibrate MODEL measures what bits cost, on the texts of its --texts DIR",
    "--plot-heads": "give --json FILE and draw it in a checkout: python -m benchmarks.eval.plots FILE heads.png",
    "--allow-cache": "a server has one cache policy: start one for each, with --kv-bits, --kv-budget and --kv-score",
    "--prompt-store-deadline": "a prompt waits for the disk as long as it takes, other requests do not; leave it out",
    "--slot-save-path": "prompts are cached without slots, and --prompt-store DIR keeps them for restarts",
}


class Commands(click.Group):
    """A group of commands with errors of the library as usage errors that name options.

    Removed commands and options are errors that name the way on.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of the first argument."""
        for name in (" ".join(args[:2]), args[0]):
            if name in REMOVED_COMMANDS and name not in self.commands:
                raise click.UsageError(f"mlx-kv {name} was removed in 0.4: {REMOVED_COMMANDS[name]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            check_removed(error.option_name)
            raise
        except ValueError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            if command is None:
                raise
            raise click.UsageError(message_of(error, command)) from error


def check_removed(option: str, where: str = "") -> None:
    """Raises click.UsageError for an option of earlier versions, after the place where it is given."""
    if option in REMOVED_OPTIONS:
        raise click.UsageError(f"{where}{option} was removed in 0.4: {REMOVED_OPTIONS[option]}")


# --- --config ---------------------------------------------------------------------------------------------------------


def read_config_file(path: Path, ctx: click.Context) -> dict[str, Any]:
    """The values of a command's parameters in a configuration file.

    Raises:
        click.UsageError: it cannot be read, is no TOML, or has a key or a value that the command does not take.
    """
    try:
        with file_errors(f"read {path}"):
            content = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no UTF-8, no TOML
        raise click.UsageError(f"{path} is not TOML: {error}") from error
    for kind, table_command in getattr(ctx.command, "tables", NO_TABLES).items():
        tables = content.pop(kind, {})
        if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
            raise click.UsageError(f"{path}: {kind} is no table of tables: write [{kind}.NAME] above its options")
        ctx.meta.setdefault(TABLES, {})[kind] = {
            name: _values(f"{path}: [{kind}.{name}]", table, click.Context(table_command, info_name=ctx.info_name))
            for name, table in tables.items()
        }
    return _values(str(path), content, ctx)


def _values(path: str, content: Mapping[str, Any], ctx: click.Context) -> dict[str, Any]:
    """The values of a command's parameters in a table of a configuration file."""
    options = {
        name.removeprefix("--"): param
        for param in ctx.command.params
        if isinstance(param, click.Option) and not param.is_eager and (not param.is_flag or param.is_bool_flag)
        for name in param.opts
        if name.startswith("--")
    }
    values: dict[str, Any] = {}
    for key, value in _entries(content):
        option = options.get(key.replace("_", "-"))
        if option is None or option.name is None:
            check_removed(f"--{key.replace('_', '-')}", f"{path}: ")
            command = f"mlx-kv {ctx.info_name}"
            raise click.UsageError(f"{path}: {key} is not an option of {command}: see {command} --help")
        if option.name in values:
            raise click.UsageError(f"{path}: {key} is given twice: leave out one of them")
        values[option.name] = _checked(f"{path}: {key}", key, value, option, ctx)
    return values


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
        if isinstance(value, list) and all(type(each) in (str, int) for each in value):
            value = ",".join(map(str, value))  # an array is words with commas between them
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise click.UsageError(f"{where} is {shown(value)}: give a text or a number")
        value = str(value)
    try:
        option.type_cast_value(ctx, value)
    except click.BadParameter as error:
        raise click.UsageError(f"{where} is {shown(value)}: {error.message}") from None
    return value
