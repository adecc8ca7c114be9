"""A table in a file: every cell once, and after an interruption only those that are missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.eval.score_cells import Cell, Kept, Place, Table, cells_of, measurements, places, policy_name

POLICIES = [Kept(), Kept("key_diff", "layers", "uniform", 512), Kept("tova", "head", "uniform", 512)]
PLACES = places(("needle", "chat"), (1024,), (False, True), (0, 1), 2)


class Asking:
    """Answers that can be interrupted, and what was asked for."""

    def __init__(self, until: int = 10**6) -> None:
        self.until, self.asked = until, 0

    def __call__(self, place: Place, missing: Sequence[Kept]) -> Iterator[Cell]:
        for kept in missing:
            if self.asked == self.until:
                raise KeyboardInterrupt
            self.asked += 1
            yield Cell(place, kept, place.seed, 4, (1.0, 0.5, 0.25))


def test_seeds_are_outermost() -> None:
    assert len(PLACES) == 16
    assert [place.seed for place in PLACES] == [0] * 8 + [1] * 8
    assert {place.task for place in PLACES[:2]} == {"needle"}


def test_a_table_goes_on_where_it_ended(tmp_path: Path) -> None:
    file, first, second = tmp_path / "cells.jsonl", Asking(until=20), Asking()
    with pytest.raises(KeyboardInterrupt):
        list(Table(file).fill(PLACES, lambda place: POLICIES, first))
    assert len(cells_of(file)) == 20
    done = list(Table(file).fill(PLACES, lambda place: POLICIES, second))
    assert second.asked == len(done) == 16 * 3 - 20
    found = cells_of(file)
    assert len(found) == len({(cell.place, cell.kept) for cell in found}) == 48
    assert not list(Table(file).fill(PLACES, lambda place: POLICIES, Asking(until=0)))


def test_a_line_that_was_not_written_to_its_end_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl"
    list(Table(file).fill(PLACES[:1], lambda place: POLICIES, Asking()))
    whole = file.read_text()
    file.write_text(whole[:-30])
    again = Asking()
    list(Table(file).fill(PLACES[:1], lambda place: POLICIES, again))
    assert again.asked == 1
    assert file.read_text() == whole
    file.write_text("{}\n")
    with pytest.raises(ValueError, match="not a cell of a table"):
        Table(file)


def test_answers_of_all_rows_count_alike_and_budgets_are_shares() -> None:
    place = Place("needle", True, False, 1024, 0, 0)
    other = Place("needle", True, False, 1024, 0, 1)
    kept = Kept("tova", "head", "uniform", 128)
    (found,) = measurements([Cell(place, kept, 1, 1, ()), Cell(other, kept, 0, 3, ())])
    assert (found.value, found.budget, found.score) == (0.25, 125, "tova head")
    assert found.task == "needle, 1,024 tokens, question seen"
    assert [policy_name(each) for each in POLICIES] == [None, "key_diff", "tova head"]
