"""Tokens that no longer lie in order: their positions and scores, which of their slots are in use, and masks of them.

Positions and scores cover the slots before the cut. From there on, position is slot - start, and scores are not needed
yet. Where heads keep different numbers of tokens, the last slots before the cut are dead in all but the longest head.
B rows; H KV heads, Hq query heads; H' is H where each head keeps its own tokens, else 1. S queries, K slots that
attention reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_kv.cache.growth import round_up
from mlx_kv.cache.layout import Budget, Row, count_slots
from mlx_kv.cache.mask import Mask, make_mask
from mlx_kv.cache.plan import Plan, plan_of
from mlx_kv.cache.protocol import Call


class SlotTokens(NamedTuple):
    """The tokens before the cut, of every row of a batch; arbitrary numbers for rows that have evicted nothing.

    Attributes:
        positions: (B, H', cut) of int32, as wide as the largest cut of any row; None before the first compaction
            of any row. Arbitrary in dead slots.
        scores: (B, H', cut) of float32; None also where every compaction scores all live tokens.
        dead: (B, H) of int32, dead slots before the cut in each head; None where there are none.
    """

    positions: mx.array | None = None
    scores: mx.array | None = None
    dead: mx.array | None = None

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self if x is not None)

    def live_positions(self, layout: Budget, row: Row, index: int) -> mx.array:
        """The position of each slot of row `index`, which stands at `row`: (H', n) of int32.

        (1, n) until it has evicted any. Arbitrary in dead slots.
        """
        n, cut = max(0, row.end), layout.cut_of(row)
        if row.evicted <= 0 or self.positions is None:
            return mx.arange(row.shared, row.shared + n, dtype=mx.int32)[None]
        kept = self.positions[index, :, :cut]  # (H', cut)
        rest = mx.broadcast_to(mx.arange(cut, n, dtype=mx.int32) - row.start, (kept.shape[0], n - cut))
        return mx.concatenate([kept, rest], axis=1)

    def alive(self, layout: Budget, row: Row, index: int, slots: int) -> mx.array:
        """Which of the first `slots` slots of row `index` a head may read, (H, slots) of bool; (1, slots) if all."""
        numbers = mx.arange(slots, dtype=mx.int32)[None]
        if row.evicted <= 0 or self.dead is None:
            return numbers >= 0
        cut = layout.cut_of(row)
        return (numbers < cut - self.dead[index][:, None]) | (numbers >= cut)

    def key_positions(self, layout: Budget, plan: Plan) -> mx.array:
        """The position of each key that attention reads with the next write, (B, 1, 1, K); all heads must agree."""
        read = count_slots(plan.ranges)
        lines = []
        for i, (row, new) in enumerate(zip(plan.rows, plan.counts, strict=True)):
            positions = self.live_positions(layout, row, i)[0]
            line = mx.concatenate([positions, mx.arange(row.offset, row.offset + new)])
            lines.append(mx.pad(line, (0, read - line.size), constant_values=mx.array(-1)))
        return mx.stack(lines)[:, None, None]

    def of_rows(self, chosen: Sequence[int]) -> SlotTokens:
        """The same of some rows, in this order."""
        index = mx.array(list(chosen))
        return SlotTokens(*(None if x is None else x[index] for x in self))

    def joined(self, rows: int, other: SlotTokens, more: int) -> SlotTokens:
        """The same of these `rows` rows, and after them of `more` others."""
        return SlotTokens(*(joined_rows(own, rows, theirs, more) for own, theirs in zip(self, other, strict=True)))

    def compute(self) -> SlotTokens:
        """Starts computing the arrays: rows may come and go often before the next compaction and build a long graph."""
        mx.async_eval(*self)  # type: ignore[no-untyped-call]
        return self


def as_wide(x: mx.array, width: int) -> mx.array:
    """(..., width) of (..., n), cut off or followed by zeros."""
    more = width - x.shape[-1]
    return x[..., :width] if more <= 0 else mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)])


def joined_rows(own: mx.array | None, rows: int, theirs: mx.array | None, more: int) -> mx.array | None:
    """Arrays of `rows` rows, and after them of `more` others, as wide as the wider; zeros where one is None."""
    like = own if own is not None else theirs
    if like is None:
        return None
    widest = max(x.shape[-1] for x in (own, theirs) if x is not None)
    parts = [
        mx.zeros((count, *like.shape[1:-1], widest), like.dtype) if x is None else as_wide(x, widest)
        for x, count in ((own, rows), (theirs, more))
    ]
    return mx.concatenate(parts)


class LayerMasks:
    """Masks of a layer that holds another number of tokens than others, or whose heads do.

    mlx-lm requests one mask for all layers, from one of them. Each such layer replaces it by its own.

    Args:
        layout: of the cache.
    """

    def __init__(self, layout: Budget) -> None:
        self._layout = layout
        self._alive: mx.array | None = None  # (B, heads, 1, slots), computed for:
        self._alive_of: tuple[object, ...] = ()
        self._updates_without_mask = 0  # full updates since a mask was last requested here

    def of(self, call: Call, rows: tuple[Row, ...], counts: tuple[int, ...] | None, kept: SlotTokens) -> Mask:
        """The mask of a call of attention after an update: None, "causal", (S, K), (B, 1, S, K) or (B, Hq, S, K).

        The last is (B, H, S, K) for packed planes, where mlx-lm groups query heads.

        Args:
            rows, counts: as of `Evictor.attend`.
        """
        self._updates_without_mask = 0
        new = call.queries.shape[2]
        stored = (new,) * len(rows) if counts is None else counts
        before = tuple([row._replace(offset=row.offset - n) for row, n in zip(rows, stored, strict=True)])
        plan = plan_of(self._layout, before, new, counts)
        uneven = kept.dead is not None
        mask = make_mask(plan, return_array=uneven)
        if not uneven:
            return mask
        read = count_slots(plan.ranges)
        alive = self._alive_slots(call, rows, kept, read)[..., :read]
        assert mask != "causal", "an array was requested"
        return alive if mask is None else alive & mask

    def _alive_slots(self, call: Call, rows: tuple[Row, ...], kept: SlotTokens, read: int) -> mx.array:
        """Which slots each head may read, (B, Hq or H, 1, at least `read`); made again after a compaction."""
        packed, query_heads = not isinstance(call.keys, mx.array), call.queries.shape[1]
        good_for = kept.dead, packed, query_heads, tuple([row.extra_slots for row in rows])
        known = self._alive
        same = len(self._alive_of) == len(good_for) and self._alive_of[0] is kept.dead
        if known is None or known.shape[3] < read or not same or self._alive_of[1:] != good_for[1:]:
            slots = round_up(read + 1)
            lines = [kept.alive(self._layout, row, i, slots) for i, row in enumerate(rows)]
            heads = max(line.shape[0] for line in lines)
            known = mx.stack([mx.broadcast_to(line, (heads, slots)) for line in lines])[:, :, None]
            if not packed and heads > 1:
                known = mx.repeat(known, query_heads // heads, axis=1)
            mx.async_eval(known)  # type: ignore[no-untyped-call]
            self._alive, self._alive_of = known, good_for
        return known

    def check_requested(self, due: bool) -> None:
        """Called before each full update; raises ValueError if it evicts and no mask was requested after the last one.

        Args:
            due: whether the update evicts.
        """
        self._updates_without_mask += 1
        if due and self._updates_without_mask > 1:
            raise ValueError(
                "layers or heads of different lengths each need a mask of their own, and none was requested: use the "
                "caches of mlx_kv.make_prompt_cache(model, policy), or open an AttentionPatch(model) around the model"
            )
