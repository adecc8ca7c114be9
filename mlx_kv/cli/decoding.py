"""Options of the commands that generate: how tokens are chosen, and what drafts them.

Imports neither MLX nor what needs it before a command runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.cli.options import Command, FiniteRange, applied
from mlx_kv.cli.prompt import prefill_option
from mlx_kv.generation.speculation import DRAFT_TOKENS

if TYPE_CHECKING:
    from mlx_kv.generation.sampling import TemperatureSampler

draft_option = click.option(
    "--draft-model", metavar="PATH_OR_HUB_ID", help="Speculate with this model; `reference`: the bundled draft."
)


@dataclass(frozen=True)
class Decoding:
    """What `decoding_options` say; each attribute is an option."""

    temp: float
    top_p: float
    seed: int | None
    prefill_step_size: int | None
    draft_model: str | None
    num_draft_tokens: int | None

    def __post_init__(self) -> None:
        if self.num_draft_tokens is not None and self.draft_model is None:
            raise click.UsageError("--num-draft-tokens needs --draft-model")

    @property
    def sampler(self) -> TemperatureSampler | None:
        """None is greedy."""
        from mlx_kv.generation.sampling import TemperatureSampler

        return TemperatureSampler(self.temp, self.top_p) if self.temp > 0 else None


def decoding_options(function: Command) -> Command:
    """How tokens are chosen and how prompts are read, for the commands that generate: they get a `Decoding`."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        decoding = Decoding(**{each.name: given.pop(each.name) for each in fields(Decoding)})
        function(decoding=decoding, **given)

    options = (
        click.option("--temp", type=FiniteRange(0), default=0.0, show_default=True, metavar="T", help="0 is greedy."),
        click.option("--top-p", type=FiniteRange(0, 1, min_open=True), default=1.0, show_default=True, metavar="P"),
        click.option("--seed", type=click.IntRange(0, 2**64 - 1), metavar="N", help="Makes sampling repeatable."),
        prefill_option(),
        draft_option,
        click.option(
            "--num-draft-tokens", type=int, metavar="K", help=f"Drafted for each pass.  [default: {DRAFT_TOKENS}]"
        ),
    )
    return applied(options, command)
