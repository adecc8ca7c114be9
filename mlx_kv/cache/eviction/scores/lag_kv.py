"""Tokens that the text after them does not explain are kept, as many in each part of the text.

Liang et al. 2025, "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important". After 4 sinks the
text is cut into partitions of 128 tokens. Keys and values of each are normalised, channel by channel, by the smallest
and largest of the next one; a token scores the softmax, over its partition, of the standard deviation of its channels,
the mean of keys and values, and then its rank in its partition. Sinks, the last full partition and what follows it
score 1, which is more than any rank. A text of fewer than two partitions scores by position alone.
"""

import mlx.core as mx

from mlx_kv.cache.eviction.scores.tokens import ScoredTokens

SINKS, PARTITION = 4, 128


def lag_kv(tokens: ScoredTokens) -> mx.array:
    rows, heads, n, _ = tokens.keys.shape
    partitions = (n - SINKS) // PARTITION
    order = mx.argsort(tokens.positions, axis=-1)  # (B, 1 or H, n): live tokens may lie in any order
    ranks = mx.broadcast_to(mx.argsort(order, axis=-1), (rows, heads, n))
    if partitions < 2:
        return ranks.astype(mx.float32) / n

    def surprise(x: mx.array) -> mx.array:  # (B, H, partitions - 1, PARTITION)
        x = mx.take_along_axis(x.astype(mx.float32), mx.broadcast_to(order[..., None], (rows, heads, n, 1)), axis=2)
        parts = x[:, :, SINKS : SINKS + partitions * PARTITION].reshape(rows, heads, partitions, PARTITION, -1)
        after = parts[:, :, 1:]
        low, high = after.min(axis=3, keepdims=True), after.max(axis=3, keepdims=True)
        return mx.softmax(((parts[:, :, :-1] - low) / mx.maximum(high - low, 1e-12)).std(axis=-1, ddof=1), axis=-1)

    both = (surprise(tokens.keys) + surprise(tokens.values)) / 2
    rank = mx.argsort(mx.argsort(both, axis=-1), axis=-1).astype(mx.float32) / PARTITION
    scored = rank.reshape(rows, heads, -1)
    kept = mx.ones((rows, heads, n - SINKS - scored.shape[2]))
    in_order = mx.concatenate([mx.ones((rows, heads, SINKS)), scored, kept], axis=2)
    return mx.take_along_axis(in_order, ranks, axis=2)
