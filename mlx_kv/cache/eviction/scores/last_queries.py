"""What the last queries look at: the part of their scores that snap_kv and tova have in common.

Decides nothing about how many queries there are, nor what is made of their attention.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_kv.cache.eviction.scores.blocks import some
from mlx_kv.cache.eviction.scores.tokens import ScoredTokens
from mlx_kv.cache.eviction.weights import Keys, Queries, mean_weights


def mean_attention(tokens: ScoredTokens) -> mx.array:
    """(B, Hq, n): what a token gets of one of the queries, in the mean over them."""
    assert tokens.queries is not None
    assert tokens.query_positions is not None
    assert tokens.scale is not None
    part = tokens.key_part
    keys = Keys(tokens.keys.shape, part or (lambda which: some(tokens.keys, which)), tokens.positions, part is not None)
    return mean_weights(Queries(tokens.queries, tokens.query_positions, tokens.scale, tokens.attention_sinks), keys)


def own_tokens(tokens: ScoredTokens) -> mx.array:
    """(B, 1 or H, n): whether a token is one of those that the queries are of."""
    assert tokens.query_positions is not None
    return tokens.positions >= tokens.query_positions[:, None, :1]


def above_all(scores: mx.array, which: mx.array) -> mx.array:
    """The same scores (B, H, n), but more than any other of its head for some tokens (B, 1 or H, n).

    Nothing is asked of other heads, which may be on another machine.
    """
    others = mx.where(which, -mx.inf, scores).max(axis=2, keepdims=True)
    return mx.where(which, mx.maximum(others, 0) + 1, scores)
