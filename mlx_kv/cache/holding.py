"""A budget that evicts nothing for a while: of a text that is to be read twice, the first reading is held whole.

While it is held, the layout plans as if no margin were overshot; masks and updates follow from that, as ever. Knows
nothing about what is read meanwhile.
"""

from __future__ import annotations

from dataclasses import replace

from mlx_kv.cache.contents import Contents
from mlx_kv.cache.layout import NO_LIMIT, Budget, Layout


def hold(held: Contents) -> None:
    """From now on nothing is evicted; without a budget nothing changes."""
    if held.evictor is not None:
        held.evictor.paused = True
        _with_margin(held, NO_LIMIT)


def release(held: Contents) -> None:
    """What is due is evicted again, before the next write."""
    if held.evictor is not None and held.evictor.paused:
        held.evictor.paused = False
        _with_margin(held, held.evictor.layout.margin)


def released(held: Contents) -> Layout:
    """The layout that it has when it is not held."""
    if held.evictor is None or not held.evictor.paused or not isinstance(held.layout, Budget):
        return held.layout
    return replace(held.layout, margin=held.evictor.layout.margin)


def _with_margin(held: Contents, margin: int | None) -> None:
    if isinstance(held.layout, Budget):
        held.layout, held.following, held.last = replace(held.layout, margin=margin), None, None
