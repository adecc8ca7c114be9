"""What commands print in columns, and the files that they write beside it: figures and JSON.

A file never replaces a device or a pipe, and JSON replaces only JSON of the same command.
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
    """Raises click.UsageError for an OSError: `cannot ...: reason`."""
    try:
        yield
    except OSError as error:
        raise click.UsageError(f"cannot {doing}: {error.strerror or error}") from error


def check_folder(option: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise click.UsageError(f"{option} {path}: there is no folder {path.parent}; make it first")


def check_plot(path: Path) -> None:
    """Checks that a figure can be written, before anything is measured.

    Raises:
        click.UsageError, ValueError: another suffix, no such directory, or no file.
    """
    try:
        from mlx_kv.plots.style import SUFFIXES
    except ImportError as error:
        raise click.UsageError('--plot needs matplotlib: pip install "mlx-kv[plot]"') from error
    if path.suffix.lower() not in SUFFIXES:
        raise click.UsageError(f"--plot {path}: give a file that ends in {', '.join(SUFFIXES)}")
    check_folder("--plot", path)
    with file_errors(f"write {path}"):
        existing_file(path)


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure.

    Raises:
        click.UsageError, ValueError: it cannot be written; an existing file is then unchanged.
    """
    with file_errors(f"write {path}"), atomic_write(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower())
    say(f"wrote {path}")


def check_json(path: Path, keys: Sequence[str], force: bool) -> None:
    """Checks that JSON can be written to a file: a new one, or one that holds a JSON object of the same command.

    Args:
        keys: of such an object; it begins with the first of them.
        force: replace any regular file.

    Raises:
        click.UsageError, ValueError: it cannot be written there.
    """
    beginning = f'{{"{keys[0]}": '.encode()

    def ours(there: Path) -> bool:
        with there.open("rb") as file:
            if file.read(len(beginning)) != beginning:  # a large file is not read whole
                return False
            file.seek(0)
            with contextlib.suppress(ValueError, RecursionError):
                return bool(set(keys) <= json.load(file).keys())
        return False

    check_folder("--json", path)
    with file_errors(f"write {path}"):
        check_replaceable(path, ours, "JSON of this command", force, "--force")


def save_json(text: str, path: Path) -> None:
    """Writes JSON and a newline.

    Raises:
        click.UsageError, ValueError: it cannot be written; an existing file is then unchanged.
    """
    with file_errors(f"write {path}"), atomic_write(path) as file:
        file.write(text.encode() + b"\n")
    say(f"wrote {path}")


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """One line per row, its cells in columns two spaces apart; trailing spaces are kept.

    Args:
        rows: of equal length.
        left: the columns that are aligned to the left; others are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
