"""Scores that are calculated from what a cache stores of its tokens: keys, values and positions.

Each is a function of n tokens of B rows and H KV heads, (tokens) -> (B, H, n), float32; higher is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from mlx_kv.cache.eviction.scores.tokens import Blocks, ScoredTokens, evaluated

LEAST_NORM = 1e-12  # key_diff: of a key that is divided by its norm
WINDOW = 16  # key_value: tokens that a local mean is over
SINKS, PARTITION = 4, 128  # lag_kv

# --- keys -------------------------------------------------------------------------------------------------------------


def key_diff(tokens: ScoredTokens) -> mx.array:
    """Keys that differ from the usual direction are kept: -cos(k, mean over tokens of k / ||k||).

    Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments". The mean is over all live tokens, so it changes with what has been evicted.
    """
    keys = Blocks(tokens.keys, tokens.key_part)

    scales: list[mx.array] = []  # of each block, 1 / ||k||

    # Two passes over the keys, as matrix products.
    def sums() -> Iterator[mx.array]:
        anchor = mx.zeros((keys.rows, keys.heads, 1, keys.dim))
        for block in keys:
            scales.append(mx.rsqrt(mx.maximum(block.square().sum(axis=-1), LEAST_NORM**2)))
            yield (anchor := anchor + scales[-1][:, :, None] @ block)

    *_, anchor = keys.evaluated(sums())
    direction = (anchor / mx.maximum(mx.linalg.norm(anchor, axis=-1, keepdims=True), LEAST_NORM)).swapaxes(2, 3)
    return keys.each(lambda block: (block @ -direction)[..., 0]) * mx.concatenate(scales, axis=2)


def key_norm(tokens: ScoredTokens) -> mx.array:
    """Keys with a low L2 norm are kept: -||k||.

    Devoto, Zhao, Scardapane and Minervini 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache
    Compression". Keys of low norm receive much attention. The sign is often given the wrong way round.
    """
    # In float32: in bfloat16, three quarters of the norms of a layer tie.
    return -Blocks(tokens.keys, tokens.key_part).each(lambda block: mx.linalg.norm(block, axis=-1))


def key_norm_high(tokens: ScoredTokens) -> mx.array:
    """The reversed sign: no method, but the control that a good key_norm must beat."""
    return -key_norm(tokens)


# --- values, and keys with values -------------------------------------------------------------------------------------


def value_norm(tokens: ScoredTokens) -> mx.array:
    """Tokens with large values are kept: ||v||^2. What a token adds to the output is its value times its attention."""
    return Blocks(tokens.values, tokens.value_part).each(lambda block: block.square().sum(axis=-1))


def key_value(tokens: ScoredTokens) -> mx.array:
    """Tokens whose key and value both stand out among their neighbours are kept: ||k||^2 ||v||^2, over local means.

    Sengupta, Chaudhary and Chakraborty 2025, "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition",
    with the local approximation of its leverage scores: each factor is divided by its mean over a window of 16 tokens.
    A mean rather than the published sum, so that tokens of a window of which only a part is scored are not worth more
    than others; in full windows it is the same order.
    """
    keys, values = Blocks(tokens.keys, tokens.key_part), Blocks(tokens.values, tokens.value_part)
    return _over_local_mean(keys) * _over_local_mean(values)


def _over_local_mean(x: Blocks) -> mx.array:
    """(B, H, n): the squared norm of each token, divided by the mean of its window."""
    energy = x.each(lambda block: block.square().sum(axis=-1))  # (B, H, n)
    n = energy.shape[2]
    padding = [(0, 0), (0, 0), (0, -n % WINDOW)]
    counted = mx.pad(mx.ones((1, 1, n)), padding).reshape(1, 1, -1, WINDOW).sum(axis=-1)
    total = mx.pad(energy, padding).reshape(*energy.shape[:2], -1, WINDOW).sum(axis=-1)
    return energy / mx.maximum(mx.repeat(total / counted, WINDOW, axis=2)[:, :, :n], 1e-12)


def lag_kv(tokens: ScoredTokens) -> mx.array:
    """Tokens that the text after them does not explain are kept, as many in each part of the text.

    Liang et al. 2025, "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important". After 4 sinks
    the text is cut into partitions of 128 tokens. Keys and values of each are normalised, channel by channel, by the
    smallest and largest of the next one; a token scores the softmax, over its partition, of the standard deviation of
    its channels, the mean of keys and values, and then its rank in its partition. Sinks, the last full partition and
    what follows it score 1, which is more than any rank. A text of fewer than two partitions scores by position alone.
    """
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


# --- positions --------------------------------------------------------------------------------------------------------


def recent(tokens: ScoredTokens) -> mx.array:
    """The newest tokens are kept: the position. With sinks, this is StreamingLLM (Xiao et al. 2023)."""
    return mx.broadcast_to(tokens.positions.astype(mx.float32), tokens.keys.shape[:3])


def random(tokens: ScoredTokens, seed: int = 0) -> mx.array:
    """Any token may go: a number in [0, 1) drawn from the token's position. The control of every comparison.

    The same everywhere for the same position: copies, loaded caches, layers and heads agree without any state, also
    where the heads of a layer are split over machines. The hash is the finaliser of MurmurHash3 (Appleby 2011).
    """
    rows, heads, n, _ = tokens.keys.shape
    x = tokens.positions.astype(mx.uint32) * mx.array(2654435761, mx.uint32) + seed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> shift)) * mx.array(factor, mx.uint32)
    return mx.broadcast_to((x >> 8).astype(mx.float32) / 2**24, (rows, heads, n))
