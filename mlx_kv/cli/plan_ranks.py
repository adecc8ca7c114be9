"""The part of a plan that is about several ranks: what each of them has of one model.

Decides how that is shown. Knows nothing about how models are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlx_kv.cli.tables import aligned

if TYPE_CHECKING:
    from mlx_kv.planning import RankMemory

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
NOTE = """\
Weights are as stored; while they are loaded, one tensor of the whole model is there beside them. Every rank has the
embeddings and what makes logits. The rank that has the least room decides how much all of them can hold."""


def unit_of(counts: Sequence[int]) -> tuple[str, int]:
    """A unit in which none of these numbers of bytes is tiny, and its bytes."""
    return next((unit for unit in UNITS if min(counts, default=0) >= unit[1] / 10), UNITS[-1])


def ranks_json(split: str, parts: Sequence[RankMemory]) -> dict[str, Any]:
    return {"split": split, "parts": [asdict(part) for part in parts]}


def ranks_table(split: str, name: str, parts: Sequence[RankMemory], contexts: Sequence[int]) -> list[str]:
    """Rows of ranks, columns of weights and of contexts, one unit for all.

    Args:
        name: of the strategy by which caches are counted.
    """
    unit, size = unit_of([*(part.weights for part in parts), *(n for part in parts for n in part.bytes_held if n)])
    lines = [[f"{unit} of each rank", "layers", "weights", *(f"{count:,}" for count in contexts)]]
    lines += [
        [f"rank {part.rank}", str(part.layers), *(f"{n / size:,.2f}" for n in (part.weights, *part.bytes_held))]
        for part in parts
    ]
    return [f"Over {len(parts)} ranks, {split} split, caches by {name!r}:", "", *(f"  {row}" for row in aligned(lines))]
