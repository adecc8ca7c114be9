"""Options of `mlx-kv serve` that say how tokens are chosen where a request does not.

Decides that what is given goes before what the model brings. Imports neither MLX nor what needs it before a command
runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.bundled import model_path
from mlx_kv.cli.options import Command, FiniteRange, applied

if TYPE_CHECKING:
    from mlx_kv.generation.settings import SamplingSettings


@dataclass(frozen=True)
class SamplingDefaults:
    """What `sampling_defaults_options` say; each attribute is an option, None where it was not given."""

    generation_config: str
    temp: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None

    def of(self, model: str) -> SamplingSettings:
        """The same in terms of the library, for a model that was loaded from here."""
        from mlx_kv.generation.settings import SamplingSettings
        from mlx_kv.mlxlm.loading import generation_config

        own = generation_config(model_path(model)) if self.generation_config == "auto" else {}
        given = {"temperature": self.temp, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        told: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return replace(SamplingSettings.of_model(own), **told)


def sampling_defaults_options(function: Command) -> Command:
    """For the server, which gets `SamplingDefaults`."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        sampling = SamplingDefaults(**{each.name: given.pop(each.name) for each in fields(SamplingDefaults)})
        function(sampling=sampling, **given)

    unless = "Where a request does not say.  [default: the model's, else"
    options = (
        click.option("--temp", type=FiniteRange(0, 2), metavar="T", help=f"{unless} 0, which is greedy]"),
        click.option("--top-p", type=FiniteRange(0, 1), metavar="P", help=f"{unless} 1]"),
        click.option("--top-k", type=click.IntRange(0), metavar="K", help=f"{unless} 0, which is all]"),
        click.option("--min-p", type=FiniteRange(0, 1), metavar="P", help=f"{unless} 0]"),
        click.option(
            "--generation-config",
            type=click.Choice(["auto", "none"]),
            default="auto",
            show_default=True,
            help="Whether the model's generation_config.json says how tokens are chosen where nobody else does.",
        ),
    )
    return applied(options, command)
