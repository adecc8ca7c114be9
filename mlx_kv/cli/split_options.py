"""Options of models that are split over several machines, as commands share them.

Decides how words become a way to split; whether a model can be split so is said where it is known (`ranks.splitting`).
"""

from __future__ import annotations

from typing import Any

import click

from mlx_kv.cli.options import Command, applied


def read_layers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Layers of each rank, separated by commas."""
    if value is None:
        return None
    words = [word.strip() for word in value.split(",")]
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) <= 6 and int(word) >= 1):
            raise click.BadParameter(f"{word!r} is no number of layers: give one for each rank, such as 20,12")
    return tuple(map(int, words))


_OPTIONS = (
    click.option(
        "--split",
        type=click.Choice(["heads", "layers"]),
        help="What each rank has: some heads of all layers, or some layers.  [default: heads where they divide]",
    ),
    click.option("--pipeline", "split", flag_value="layers", help="mlx-lm's word for --split layers."),
    click.option(
        "--layers",
        metavar="N,N",
        callback=read_layers,
        help="Layers of each rank, for machines of different sizes; the first rank has the last layers.",
    ),
)


def split_options(function: Command) -> Any:
    """--split and --layers."""
    return applied(_OPTIONS, function)
