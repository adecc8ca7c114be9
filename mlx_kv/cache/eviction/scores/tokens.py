"""What a score is given: all that a cache knows of the tokens to be scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

# Some of the n tokens, a slice of them or indices (B, 1 or H, m), as they were before they were stored: (B, H, m, D).
Part = Callable[[slice | mx.array], mx.array]


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredTokens:
    """Tokens to be scored, n of each row and head, in no particular order. What comes to be known of them is one more
    field: scores that do not look at it stay as they are.

    Attributes:
        keys: (B, H, n, Dk), in the dtype of the model, positions rotated in.
        values: (B, H, n, Dv).
        positions: (B, 1, n) of int32, or (B, H, n) where every head keeps its own tokens.
        key_part, value_part: the same keys and values, some of them at a time. Whoever evaluates one part after the
            other never holds all of them decoded, or in float32.
        reread: (B, H, n) of float32, for scores that want it: the largest share of attention that each token got when
            its text was read once more; -1 where it was not.
    """

    keys: mx.array
    values: mx.array
    positions: mx.array
    key_part: Part | None = None
    value_part: Part | None = None
    reread: mx.array | None = None
