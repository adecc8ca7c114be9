"""How far a long command is: a bar on a terminal, a line now and then anywhere else; both with an estimate.

Prints at most one line every ten seconds where stderr is no terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import click

from mlx_kv.cli.notices import say

SECONDS_BETWEEN = 10.0  # lines, where there is no terminal


class Progress:
    """Steps of a known number, on stderr.

    Args:
        work: cost of each step, in any unit; the time left is estimated from it.
        unit: what a step is called.
    """

    def __init__(self, work: Sequence[float], unit: str) -> None:
        self.done, self.total, self._work, self._unit = 0, len(work), work, unit
        self._bar: Any = None
        self._begun = self._said = time.monotonic()

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
        """One more is done, of `what`."""
        self.done += 1
        if self._bar is not None:
            self._bar.set_description(f"{what}, {self.done} of {self.total} {self._unit}s", refresh=False)
            self._bar.update(self._work[self.done - 1])
        elif time.monotonic() - self._said >= SECONDS_BETWEEN and self.done < self.total:
            self._said = time.monotonic()
            left = (self._said - self._begun) * sum(self._work[self.done :]) / sum(self._work[: self.done])
            say(f"{what}, {self.done} of {self.total} {self._unit}s, {spoken(left)} left")

    def say(self, text: str) -> None:
        """An answer, on stdout, beside a bar that stays below it."""
        if self._bar is not None:
            self._bar.clear()
        click.echo(text)
        if self._bar is not None:
            self._bar.refresh()


def spoken(seconds: float) -> str:
    """About 40 s, 12 min, 1.5 h."""
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"
