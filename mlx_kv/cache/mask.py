"""Attention masks from the plan of a write: whether one is needed at all, and its only formula.

Masks are boolean, True where a query may attend: (S, K), or (B, 1, S, K) where rows differ.
"""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

from mlx_kv.cache.layout import Append, count_seen, count_slots
from mlx_kv.cache.plan import Plan

Mask = mx.array | Literal["causal"] | None


def visible(
    key_positions: mx.array,
    query_positions: mx.array,
    window: int | None,
    sinks: int = 0,
    chunk_size: int | None = None,
) -> mx.array:
    """Whether a query at position q sees a key at position p.

    p >= 0, p <= q and, in a window, q - p < window; of a window with sinks, the first `sinks` positions are always seen
    and count towards it: p < sinks or q - p < window - sinks. In chunks, p and q are in the same one.

    Args:
        key_positions: (..., 1, K).  query_positions: (..., S, 1).

    Returns:
        (..., S, K), boolean.
    """
    seen = (key_positions >= 0) & (key_positions <= query_positions)
    if chunk_size is not None:
        seen = seen & (key_positions // chunk_size == query_positions // chunk_size)
    if window is None:
        return seen
    near = query_positions - key_positions < window - sinks
    return seen & (near | (key_positions < sinks) if sinks else near)


def key_positions(plan: Plan) -> mx.array:
    """The position of each key that attention reads: (K,), or (B, 1, 1, K) where rows differ.

    A slot of a ring holds the largest position p <= newest with p = slot modulo the turn; below 0 it is still empty.
    """
    rows = plan.distinct
    if plan.transient:
        new = [list(range(row.offset, row.offset + plan.new)) for row in rows]
        positions = mx.array([seen + written for seen, written in zip(plan.live(), new, strict=True)])
    else:
        aranges = [mx.arange(first, last) for first, last in plan.ranges]
        slots = (aranges[0] if len(aranges) == 1 else mx.concatenate(aranges))[None]
        positions = slots - mx.array([[row.start] for row in rows])
        if not plan.ordered:
            sinks, turn = plan.layout.sinks, plan.layout.max_slots - plan.layout.sinks
            newest = mx.array([[row.offset + new - 1] for row, new in zip(rows, plan.counts, strict=False)])
            around = newest - (newest - slots) % turn
            # In a shorter row beside one that wraps, a slot of the ring may be empty; sinks have slots of their own.
            positions = mx.where(slots < sinks, slots, mx.where(around < sinks, -1, around))
    return positions[0] if plan.uniform else positions[:, None, None]


def make_mask(
    plan: Plan, window: int | None = None, return_array: bool = False, positions: mx.array | None = None
) -> Mask:
    """The mask for the new tokens of a plan.

    None for one token that sees every key, "causal" where the new tokens are the last keys in order and see all before
    them: the fast paths of every device. An array wherever one of these would be wrong.

    Args:
        window: each query sees at most this many tokens, itself included, whatever the layout keeps.
        return_array: the model reads the mask as an array; one token that sees all still gets None, as from mlx-lm.
        positions: of each key that attention reads, (K,) or (B, 1, 1, K), where they do not follow from the slots.
            Without a window they are not needed even after evictions: all that is left precedes every query.
    """
    layout, kept = plan.layout, plan.layout.window
    narrower = window if window is not None and (kept is None or window < kept) else None
    sees_all = not (plan.padded or plan.transient) and (positions is None or narrower is None)
    if sees_all:  # so far: the last query sees every key that is read. With several queries, keys are in order
        read, count = count_slots(plan.ranges), plan.new
        sees_all = (narrower is None or read <= narrower) and all(
            row.start <= 0 and read <= min(row.end + count, count_seen(layout, row.offset + count - 1))
            for row in plan.distinct
        )
    if sees_all and plan.new == 1:
        return None
    if sees_all and plan.uniform and not return_array:
        return "causal"
    if plan.padded and plan.alike and isinstance(layout, Append) and window is None and not return_array:
        first = plan.rows[0]
        if first.offset >= 0 and plan.ranges == ((0, first.end + plan.new),):
            return "causal"  # as if padding were in the slots behind: no token of a row sees these
    new = mx.arange(plan.new)[:, None]  # (S, 1)
    offsets = [row.offset for row in plan.rows]
    queries = new + offsets[0] if plan.uniform else new + mx.array(offsets)[:, None, None, None]
    keys = key_positions(plan) if positions is None else positions
    seen = visible(keys, queries, kept, layout.sinks, layout.chunk_size)
    # A window of the model that is narrower than what is kept has no sinks.
    seen = seen if narrower is None else seen & visible(keys, queries, narrower)
    if not plan.padded:
        return seen
    # Padding sees everything: a softmax over nothing would be NaN and spread from layer to layer.
    counts = mx.array(plan.counts)[:, None, None, None]
    return seen | (new >= counts) | (queries < 0)
