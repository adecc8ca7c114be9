"""Options that give an answer a form: a JSON schema, a regular expression, a grammar.

Decides that there is one at the most. Imports neither MLX nor what needs it before a command runs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.cli.options import Command, LeadersFile, applied

if TYPE_CHECKING:
    from mlx_kv.generation.grammar.constraint import Constraint
    from mlx_kv.generation.settings import LogitsProcessor


@dataclass(frozen=True)
class Form:
    """What `form_options` say; each attribute is an option."""

    json_schema: Path | None
    grammar: Path | None
    regex: str | None

    def __post_init__(self) -> None:
        given = [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None]
        if len(given) > 1:
            raise click.UsageError(f"{given[0]} and {given[1]} both say what the answer is to be: give one")

    @property
    def constraint(self) -> Constraint | None:
        """The same, in terms of the library; None lets the answer be any.

        Raises:
            click.BadParameter: a file that is no JSON.
        """
        from mlx_kv.generation.grammar import constraint as constraints

        if self.regex is not None:
            return constraints.regex(self.regex)
        if self.grammar is not None:
            return constraints.grammar(self.grammar.read_text())
        if self.json_schema is None:
            return None
        try:
            return constraints.json_schema(json.loads(self.json_schema.read_text()))
        except (ValueError, RecursionError) as error:
            raise click.BadParameter(f"{self.json_schema} is no JSON: {error}", param_hint="--json-schema") from None

    def processors(self, tokenizer: Any, prompt: Sequence[int], before: int, chat: bool) -> tuple[LogitsProcessor, ...]:
        """What keeps the answer to it.

        Args:
            prompt: token ids that are read now.
            before: tokens before them that the processors are shown as well.
            chat: whether the model may think before it answers.

        Raises:
            ValueError: it cannot be followed, and why.
        """
        constraint = self.constraint
        if constraint is None:
            return ()
        from mlx_kv.generation.grammar.compiled import GrammarCompiler
        from mlx_kv.generation.grammar.processor import LeadIn

        lead_in = LeadIn.after(tokenizer, prompt) if chat else None
        return (GrammarCompiler(tokenizer).compile(constraint).processor(before + len(prompt), lead_in),)


def form_options(function: Command) -> Command:
    """For the commands whose answer may have a form: they get a `Form`."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        function(form=Form(**{each.name: given.pop(each.name) for each in fields(Form)}), **given)

    file = LeadersFile(exists=True, dir_okay=False, path_type=Path)
    options = (
        click.option("--json-schema", type=file, metavar="FILE", help="The answer is JSON that this schema describes."),
        click.option("--regex", metavar="PATTERN", help="The answer is what all of this expression describes."),
        click.option(
            "--grammar",
            type=file,
            metavar="FILE",
            help="The answer is what this grammar describes: llama.cpp's or Lark's.",
        ),
    )
    return applied(options, command)
