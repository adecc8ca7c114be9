"""What rows know of their tokens, in arrays as wide as the row that knows most: (B, ..., n).

Decides that what is not there is 0. Knows nothing about what it is.
"""

from __future__ import annotations

import mlx.core as mx


def as_wide(x: mx.array, width: int) -> mx.array:
    """(..., width) of (..., n): its first, or zeros after all of them."""
    more = width - x.shape[-1]
    return x[..., :width] if more <= 0 else mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)])


def joined_rows(own: mx.array | None, rows: int, theirs: mx.array | None, more: int) -> mx.array | None:
    """What `rows` rows know, and after them `more` others; None is nothing."""
    like = own if own is not None else theirs
    if like is None:
        return None
    widest = max(x.shape[-1] for x in (own, theirs) if x is not None)
    parts = [
        mx.zeros((count, *like.shape[1:-1], widest), like.dtype) if x is None else as_wide(x, widest)
        for x, count in ((own, rows), (theirs, more))
    ]
    return mx.concatenate(parts)
