"""Tokens that the text after them does not explain are kept, as many in each part of the text.

Liang et al. 2025, "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important". After 4 sinks the
text is cut into partitions of 128 tokens. Keys and values of each are normalised, channel by channel, by the smallest
and largest of the next one; a token scores the softmax, over its partition, of the standard deviation of its channels,
the mean of keys and values, and then its rank in its partition. Sinks, the last full partition and what follows it
score 1, which is more than any rank. A text of fewer than two partitions scores by position alone.
"""

import mlx.core as mx

from mlx_kv.cache.eviction.scores.blocks import Blocks, evaluated
from mlx_kv.cache.eviction.scores.tokens import ScoredTokens

SINKS, PARTITION = 4, 128


def lag_kv(tokens: ScoredTokens) -> mx.array:
    rows, heads, n, dim = tokens.keys.shape
    partitions = (n - SINKS) // PARTITION
    order = mx.argsort(tokens.positions, axis=-1)  # (B, 1 or H, n): live tokens may lie in any order
    ranks = mx.broadcast_to(mx.argsort(order, axis=-1), (rows, heads, n))
    if partitions < 2:
        return ranks.astype(mx.float32) / n

    def surprise(x: Blocks) -> mx.array:  # (B, H, partitions - 1, PARTITION)
        def of(first: int) -> mx.array:  # one partition after the other: each is read twice
            start = SINKS + first * PARTITION
            here, after = x.part(order[:, :, start : start + 2 * PARTITION]).split(2, axis=2)
            low, high = after.min(axis=2, keepdims=True), after.max(axis=2, keepdims=True)
            return mx.softmax(((here - low) / mx.maximum(high - low, 1e-12)).std(axis=-1, ddof=1), axis=-1)

        nbytes = 4 * rows * heads * 2 * PARTITION * dim
        return mx.stack(list(evaluated(map(of, range(partitions - 1)), nbytes)), axis=2)

    both = (surprise(Blocks(tokens.keys, tokens.key_part)) + surprise(Blocks(tokens.values, tokens.value_part))) / 2
    rank = mx.argsort(mx.argsort(both, axis=-1), axis=-1).astype(mx.float32) / PARTITION
    scored = rank.reshape(rows, heads, -1)
    kept = mx.ones((rows, heads, n - SINKS - scored.shape[2]))
    in_order = mx.concatenate([mx.ones((rows, heads, SINKS)), scored, kept], axis=2)
    return mx.take_along_axis(in_order, ranks, axis=2)
