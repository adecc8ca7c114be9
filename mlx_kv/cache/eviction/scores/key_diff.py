"""Keys that differ from the usual direction are kept: -cos(k, mean over tokens of k / ||k||).

Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments". The mean is over all live tokens, so it changes with what has been evicted.
"""

from collections.abc import Iterator

import mlx.core as mx

from mlx_kv.cache.eviction.scores.blocks import Blocks
from mlx_kv.cache.eviction.scores.tokens import ScoredTokens

LEAST_NORM = 1e-12


def key_diff(tokens: ScoredTokens) -> mx.array:
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
