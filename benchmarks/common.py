"""What every benchmark here does: sides take turns in one process, medians of the rounds count."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any


def rounds_from_command_line(doc: str | None, default: int = 5) -> int:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=default, help="how often each side is measured")
    return max(1, int(parser.parse_args().rounds))


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def take_turns(rounds: int, sides: dict[str, Callable[[], Any]]) -> dict[str, list[Any]]:
    """Each side once a round, in alternating order, after one round that does not count."""
    runs: dict[str, list[Any]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side in list(sides)[:: 1 if number % 2 else -1]:
            result = sides[side]()
            if number:
                runs[side].append(result)
    return runs
