"""`--help` on one screen: common options in sections, two examples; `--help-all` has the rest."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import click

Function: TypeAlias = Callable[..., Any]
Decorated = TypeVar("Decorated", bound=Callable[..., Any] | click.Command)

OPTIONS = "Options"  # the section of options without another one; it is the last
TERM_WIDTH = 30  # columns of names
LINE_WIDTH = 44  # columns beside them, in a terminal of 80
EXAMPLES = 2  # in `--help`


class Option(click.Option):
    """An option in a section of `--help`.

    Attributes:
        section: heading of the section.
        summary: one short line for `--help`; options without one are in `--help-all` only.
    """

    def __init__(self, *arguments: Any, section: str = OPTIONS, summary: str = "", **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.section, self.summary = section, summary


class SectionedCommand(click.Command):
    """A command with `--help` of one screen, and `--help-all`."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_print_full_help,
                help="Show all options and examples.",
            )
        )

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the common options, the first paragraph of the description, and the first examples."""
        text = inspect.cleandoc(self.help or "").partition("\n\n")[0]
        examples = inspect.cleandoc(self.epilog or "").split("\n\b")[0].splitlines()[: EXAMPLES + 2]
        self._format(ctx, formatter, text, "\n".join(examples), common=True)

    def full_help(self, ctx: click.Context) -> str:
        """The text of `--help-all`."""
        formatter = ctx.make_formatter()
        text, examples = (inspect.cleandoc(each or "") for each in (self.help, self.epilog))
        self._format(ctx, formatter, text, examples, common=False)
        return formatter.getvalue().rstrip("\n")

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


def _print_full_help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        assert isinstance(ctx.command, SectionedCommand)
        click.echo(ctx.command.full_help(ctx))
        ctx.exit()


def command(name: str | None = None, **attributes: Any) -> Callable[[Function], SectionedCommand]:
    """As `click.command`."""
    return click.command(name, cls=SectionedCommand, **attributes)


def option(*names: str, **attributes: Any) -> Callable[[Decorated], Decorated]:
    """As `click.option`; the other attributes include those of `Option`."""
    return click.option(*names, cls=Option, **attributes)
