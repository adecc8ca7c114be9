"""Rows of text in columns, for the commands that print tables.

Decides how cells line up. Knows nothing about what is in them: numbers come as they are to be read, and a row keeps its
trailing spaces. Ten lines, where `tabulate` would be one more dependency, and would have to be told to leave numbers
such as 4,096 and indented names as they are.
"""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """A line for each row, its cells in columns two spaces apart.

    Args:
        rows: of equal length.
        left: the columns that begin at the left; others end at the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
