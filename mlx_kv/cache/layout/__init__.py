"""Which slot holds which position.

A layout determines which slots an update writes, which slots attention reads, and what a trim can undo. Integers only.
A *row* is one sequence of the batch. Rows of different lengths, as after a trim of one row alone, are *ragged*.

Append: slot = start + position; a row owns the slots [start, end), and every slot from `end` on is dead until written.
Budget: as Append, until a compaction evicts tokens and lowers start by their number.
Ring: a slot is overwritten by the token `turn` positions later.
Room: the longest write that currently has slots, in rings and budgets: more while a prompt is read than in decoding.
Chunks: a ring for chunked attention, where a token sees only its own chunk of the text; read in order of positions.
"""

from __future__ import annotations

from mlx_kv.cache.layout.append import Append
from mlx_kv.cache.layout.base import (
    NO_LIMIT,
    Layout,
    Ranges,
    Row,
    WriteCapacity,
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
    "WriteCapacity",
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
    raise ValueError(f"{name!r} is not a layout: there are append, ring, chunks and budget")
