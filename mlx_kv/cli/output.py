"""Output of commands: notes, sizes, tables and progress, and the files that they write: figures and JSON.

A file never replaces a device or a pipe, and JSON replaces only JSON of the same command.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.files.atomic_write import atomic_write, check_replaceable, existing_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINE_SECONDS = 10.0  # between lines of progress, where there is no terminal
SHORT_PROMPT = 128  # tokens, for which no bar is shown

# --- lines ------------------------------------------------------------------------------------------------------------


def say(line: str) -> None:
    """Prints one line on stderr, marked as the program's."""
    click.echo(f"mlx-kv: {line}", err=True)


def tokens_line(name: str, tokens: int, per_second: float | None) -> str:
    """A line of statistics, without a rate where it was not measured."""
    rate = "" if per_second is None else f"  {per_second:10,.1f} tokens/s"
    return f"{name:<11} {tokens:7,} token{' ' if tokens == 1 and rate else '' if tokens == 1 else 's'}{rate}"


def human_bytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e10 else f"{count / 1e6:,.2f} MB"


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


# --- progress ---------------------------------------------------------------------------------------------------------


class Progress:
    """Progress of a known number of steps, on stderr: a bar on a terminal, else a line now and then.

    Args:
        work: of each step, in any unit; the time that is left is estimated from it.
        unit: the name of a step.
    """

    def __init__(self, work: Sequence[float], unit: str) -> None:
        self.done, self.total, self._work, self._unit = 0, len(work), work, unit
        self._bar: Any = None
        self._started = self._printed = time.monotonic()

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from tqdm import tqdm

            shape = "{desc}: {percentage:3.0f}% {bar} {elapsed}<{remaining}{postfix}"
            self._bar = tqdm(total=sum(self._work), leave=False, file=sys.stderr, bar_format=shape)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, what: str) -> None:
        """Counts one more step, of `what`."""
        self.done += 1
        if self._bar is not None:
            self._bar.set_description(f"{what}, {self.done} of {self.total} {self._unit}s", refresh=False)
            self._bar.update(self._work[self.done - 1])
        elif time.monotonic() - self._printed >= LINE_SECONDS and self.done < self.total:
            self._printed = time.monotonic()
            left = (self._printed - self._started) * sum(self._work[self.done :]) / sum(self._work[: self.done])
            say(f"{what}, {self.done} of {self.total} {self._unit}s, {duration(left)} left")


def duration(seconds: float) -> str:
    """About 40 s, 12 min, 1.5 h."""
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


@contextlib.contextmanager
def prefill_bar(prompt_tokens: int, step: int, name: str = "prompt") -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on a terminal for a prompt of several chunks, or of a long one; mlx-lm's callback."""
    if not sys.stderr.isatty() or prompt_tokens <= min(step, SHORT_PROMPT):
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=prompt_tokens, desc=name, unit="tok", leave=False, file=sys.stderr) as bar:

        def advance(done: int, total: int) -> None:
            bar.update(done - bar.n)
            if done == total:
                bar.close()

        yield advance


# --- files ------------------------------------------------------------------------------------------------------------


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
        from mlx_kv.plots import SUFFIXES
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
        check_replaceable(path, ours, "JSON file of this command", force, "--force")


def save_json(text: str, path: Path) -> None:
    """Writes JSON and a newline.

    Raises:
        click.UsageError, ValueError: it cannot be written; an existing file is then unchanged.
    """
    with file_errors(f"write {path}"), atomic_write(path) as file:
        file.write(text.encode() + b"\n")
    say(f"wrote {path}")
