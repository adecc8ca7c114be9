"""What must be known of tokens that no longer lie in order: their positions, and scores that are asked for only once.

Both cover the slots before the cut. From there on position is slot - start, and scores are not needed yet. Where heads
keep different numbers of tokens, the last slots before the cut hold none in all but the longest.
B rows; H' is the number of heads where each keeps its own tokens, else 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_kv.cache.layout import Budget, Plan, Row, count_slots


class KeptTokens(NamedTuple):
    """Of every row of a batch; rows that have evicted nothing have any numbers.

    Attributes:
        positions: (B, H', cut) of int32, as wide as the largest cut of any row; None before the first compaction
            of any row. Any number where a head has no token.
        scores: (B, H', cut) of float32; None also where all live tokens are scored at every compaction.
        dead: (B, H) of int32, how many slots before the cut hold no token of this head; None where all hold one.
    """

    positions: mx.array | None = None
    scores: mx.array | None = None
    dead: mx.array | None = None

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self if x is not None)

    def live_positions(self, layout: Budget, row: Row, index: int) -> mx.array:
        """The position of each slot of row `index`, which stands at `row`: (H', n) of int32.

        (1, n) until it has evicted any. Any number where a head has no token.
        """
        n, cut = max(0, row.end), layout.cut_of(row)
        if row.evicted <= 0 or self.positions is None:
            return mx.arange(n, dtype=mx.int32)[None]
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
            held = self.live_positions(layout, row, i)[0]
            line = mx.concatenate([held, mx.arange(row.offset, row.offset + new)])
            lines.append(mx.pad(line, (0, read - line.size), constant_values=mx.array(-1)))
        return mx.stack(lines)[:, None, None]

    def of_rows(self, chosen: Sequence[int]) -> KeptTokens:
        """Of some rows, in this order."""
        index = mx.array(list(chosen))
        return KeptTokens(*(None if x is None else x[index] for x in self))

    def joined(self, rows: int, other: KeptTokens, more: int) -> KeptTokens:
        """Of these `rows` rows, and after them `more` others."""
        return KeptTokens(*(joined_rows(own, rows, theirs, more) for own, theirs in zip(self, other, strict=True)))

    def compute(self) -> KeptTokens:
        """Has them computed now: rows may come and go for long before the next compaction, and make a chain of them."""
        mx.async_eval(*self)  # type: ignore[no-untyped-call]
        return self


def as_wide(x: mx.array, width: int) -> mx.array:
    """(..., width) of (..., n): its first, or zeros after all of them."""
    more = width - x.shape[-1]
    return x[..., :width] if more <= 0 else mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)])


def joined_rows(own: mx.array | None, rows: int, theirs: mx.array | None, more: int) -> mx.array | None:
    """What is known of `rows` rows, and after them of `more` others, as wide as the wider; zeros where it is None."""
    like = own if own is not None else theirs
    if like is None:
        return None
    widest = max(x.shape[-1] for x in (own, theirs) if x is not None)
    parts = [
        mx.zeros((count, *like.shape[1:-1], widest), like.dtype) if x is None else as_wide(x, widest)
        for x, count in ((own, rows), (theirs, more))
    ]
    return mx.concatenate(parts)
