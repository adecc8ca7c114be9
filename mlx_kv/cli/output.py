"""Files that a command writes beside its output: figures, and JSON; and which existing files they may replace.

Neither replaces a device or a pipe, and JSON replaces only JSON of the same kind. Files are written by `atomic_write`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlx_kv.cli.notices import say
from mlx_kv.files.atomic_write import atomic_write, check_replaceable, existing_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextlib.contextmanager
def file_errors(doing: str) -> Iterator[None]:
    """What the system says about a file becomes a refusal."""
    try:
        yield
    except OSError as error:
        raise click.UsageError(f"cannot {doing}: {error.strerror or error}") from error


def check_folder(option: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise click.UsageError(f"{option} {path}: there is no folder {path.parent}; make it first")


def check_plot(path: Path) -> None:
    """Refuses a figure that could not be written, before anything is worked out.

    Raises:
        click.UsageError, ValueError: it is none, or has no place.
    """
    try:
        from mlx_kv import plots
    except ImportError as error:
        raise click.UsageError('--plot needs matplotlib: pip install "mlx-kv[plot]"') from error
    if path.suffix.lower() not in plots.SUFFIXES:
        raise click.UsageError(f"--plot {path}: give a file that ends in {', '.join(plots.SUFFIXES)}")
    check_folder("--plot", path)
    with file_errors(f"write {path}"):
        existing_file(path)


def save_figure(figure: Figure, path: Path) -> None:
    """Raises click.UsageError, ValueError: it cannot be written; an older file is then as it was."""
    with file_errors(f"write {path}"), atomic_write(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower())
    say(f"wrote {path}")


def check_json(path: Path, parts: Sequence[str], force: bool) -> None:
    """Refuses a file that could not be written, or, unless it is forced, one that is no JSON object with these parts.

    Args:
        parts: the first is where such JSON begins.

    Raises:
        click.UsageError, ValueError: it has no place.
    """
    beginning = f'{{"{parts[0]}": '.encode()

    def ours(there: Path) -> bool:
        with there.open("rb") as file:
            if file.read(len(beginning)) != beginning:  # however large it is, no more is read
                return False
            file.seek(0)
            with contextlib.suppress(ValueError, RecursionError):
                return bool(set(parts) <= json.load(file).keys())
        return False

    check_folder("--json", path)
    with file_errors(f"write {path}"):
        check_replaceable(path, ours, "JSON of this command", force, "--force")


def save_json(text: str, path: Path) -> None:
    """Raises click.UsageError, ValueError: it cannot be written; an older file is then as it was."""
    with file_errors(f"write {path}"), atomic_write(path) as file:
        file.write(text.encode() + b"\n")
    say(f"wrote {path}")
