"""Tokens with large values are kept: ||v||^2. What a token adds to the output is its value times its attention."""

import mlx.core as mx

from mlx_kv.cache.eviction.scores.blocks import each_block
from mlx_kv.cache.eviction.scores.tokens import ScoredTokens


def value_norm(tokens: ScoredTokens) -> mx.array:
    return each_block(lambda block: block.square().sum(axis=-1), tokens.values)
