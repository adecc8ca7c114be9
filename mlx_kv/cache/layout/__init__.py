"""Which slot holds which position.

Decides where the tokens of an update go, which slots attention reads, and what a trim can undo. Integers only: knows
nothing about arrays, so it is tested in microseconds. A *row* is one sequence of the batch. Rows need not line up:
after a trim of one row alone, they are *ragged*.

Append: slot = start + position; a row owns the slots [start, end), and every slot from `end` on is dead until written.
Budget: the same, and now and then a compaction, after which start is below 0.
Ring: slots are used again, `turn` positions later.
Room: rings and budgets have slots for the writes that come, so the same layout has more while a prompt is read.
Chunks: the same ring for models whose tokens see their own chunk of the text; attention reads it in order.
"""

from __future__ import annotations

from mlx_kv.cache.layout.append import Append
from mlx_kv.cache.layout.base import (
    NO_LIMIT,
    Layout,
    Ranges,
    Row,
    count_seen,
    count_slots,
    enough_slots,
    moves_between,
    planned,
    reshaped,
    stay,
    trim_rows,
    trimmed,
)
from mlx_kv.cache.layout.budget import KEEP_RECENT, Budget, default_keep_recent
from mlx_kv.cache.layout.chunks import Chunks
from mlx_kv.cache.layout.plan import Plan, plan_of
from mlx_kv.cache.layout.ring import Ring

__all__ = [
    "KEEP_RECENT",
    "NO_LIMIT",
    "Append",
    "Budget",
    "Chunks",
    "Layout",
    "Plan",
    "Ranges",
    "Ring",
    "Row",
    "count_seen",
    "count_slots",
    "default_keep_recent",
    "enough_slots",
    "make_layout",
    "moves_between",
    "plan_of",
    "planned",
    "reshaped",
    "stay",
    "trim_rows",
    "trimmed",
]


def make_layout(name: str, *numbers: int) -> Layout:
    """The layout of these `parameters`.

    Raises:
        ValueError: no layout has this name.
    """
    match name:
        case "append":
            return Append()
        case "ring":
            return Ring(*numbers)
        case "chunks":
            return Chunks(*numbers)
        case "budget":
            return Budget(*numbers)
    raise ValueError(f"{name!r} is no layout: there are append, ring, chunks and budget")
