"""What commands say beside answers: lines on stderr, each marked as the program's own.

Decides the mark alone. Imports neither MLX nor what needs it.
"""

from __future__ import annotations

import click


def say(line: str) -> None:
    """One line."""
    click.echo(f"mlx-kv: {line}", err=True)
