"""The cells of score_table.py, a JSON line for each case under each policy; a later run measures what is missing.

Seeds are outermost, so that an interrupted run has some cells of every task. One case is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from .results import Measurement


@dataclass(frozen=True)
class Place:
    """A case of a task: everything but the policy.

    Attributes:
        seen: whether the question is seen when the context is compressed.
        rolling: whether the caches compact while the context is read.
        context: tokens.
    """

    task: str
    seen: bool
    rolling: bool
    context: int
    seed: int
    row: int


@dataclass(frozen=True)
class Kept:
    """A policy: a score, what is kept together, and the budget; the full cache has none of them."""

    score: str | None = None
    share: str | None = None
    layers: str | None = None
    budget: int | None = None


@dataclass(frozen=True)
class Cell:
    """The answers of a case under a policy; seconds and slots as for `Answered`."""

    place: Place
    kept: Kept
    right: int
    counted: int
    seconds: tuple[float, ...]
    slots: float | None = None

    def line(self) -> str:
        flat = asdict(self.place) | asdict(self.kept)
        measured = {"right": self.right, "counted": self.counted, "seconds": self.seconds, "slots": self.slots}
        return json.dumps(flat | measured)

    @classmethod
    def of_line(cls, line: str) -> Cell:
        """Reads a line.

        Raises:
            ValueError: it is no cell.
        """
        found: dict[str, Any] = json.loads(line)
        try:
            place = Place(**{name: found[name] for name in Place.__dataclass_fields__})
            kept = Kept(**{name: found[name] for name in Kept.__dataclass_fields__})
            return cls(place, kept, found["right"], found["counted"], tuple(found["seconds"]), found.get("slots"))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a cell of a table: {line[:80]!r}") from error


def cells_of(file: Path) -> list[Cell]:
    """The cells of a file; an incomplete last line is left out.

    Raises:
        ValueError: another line that is no cell.
    """
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    return [Cell.of_line(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class Table:
    """The cells of a file, and more of them.

    Args:
        file: JSON lines; it is made where there is none.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.cells = {(cell.place, cell.kept): cell for cell in cells_of(file)}
        if file.exists() and not file.read_bytes().endswith(b"\n"):  # a run was interrupted while it wrote
            file.write_text("".join(cell.line() + "\n" for cell in self.cells.values()), encoding="utf-8")

    def missing(self, place: Place, policies: Sequence[Kept]) -> list[Kept]:
        return [kept for kept in policies if (place, kept) not in self.cells]

    def add(self, cell: Cell) -> None:
        with self._file.open("a", encoding="utf-8") as out:
            out.write(cell.line() + "\n")
        self.cells[cell.place, cell.kept] = cell

    def fill(
        self,
        places: Sequence[Place],
        policies: Callable[[Place], Sequence[Kept]],
        ask: Callable[[Place, Sequence[Kept]], Iterator[Cell]],
    ) -> Iterator[Cell]:
        """Measures the missing cells, and yields each once it is in the file.

        Args:
            policies: of a case.
            ask: measures a case under some policies.
        """
        for place in places:
            if missing := self.missing(place, policies(place)):
                for cell in ask(place, missing):
                    self.add(cell)
                    yield cell


def places(
    tasks: Sequence[str],
    contexts: Sequence[int],
    seen: Sequence[bool],
    seeds: Sequence[int],
    rows: int,
    rolling: bool = False,
) -> list[Place]:
    """All cases, seeds outermost."""
    return [
        Place(task, each, rolling, context, seed, row)
        for seed, row, context, task, each in product(seeds, range(rows), contexts, tasks, seen)
    ]


def measurements(cells: Sequence[Cell]) -> list[Measurement]:
    """Accuracies of all rows of a seed together; contexts and questions seen or not are separate tasks.

    Budgets are shares of the context in thousandths.
    """
    groups: dict[tuple[str, str | None, int | None, int], list[Cell]] = {}
    for cell in cells:
        budget = None if cell.kept.budget is None else round(1000 * cell.kept.budget / cell.place.context)
        groups.setdefault((named(cell.place), policy_name(cell.kept), budget, cell.place.seed), []).append(cell)
    made = []
    for (task, score, budget, seed), group in groups.items():
        counted = sum(cell.counted for cell in group)
        if counted:
            value = sum(cell.right for cell in group) / counted
            made.append(Measurement(task, "accuracy", score, budget, seed, value))
    return made


def named(place: Place) -> str:
    """needle, 1,024 tokens, question seen."""
    return f"{place.task}, {place.context:,} tokens" + ", question seen" * place.seen + ", rolling" * place.rolling


def policy_name(kept: Kept) -> str | None:
    """A score, with what differs from the defaults; None is the full cache."""
    if kept.score is None:
        return None
    more = [each for each, usual in ((kept.share, "layers"), (kept.layers, "uniform")) if each != usual]
    return " ".join([kept.score, *(str(each) for each in more)])
