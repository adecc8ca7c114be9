"""Tokens with large values are kept: ||v||^2. What a token adds to the output is its value times its attention."""

import mlx.core as mx

from mlx_kv.cache.eviction.scores.blocks import Blocks
from mlx_kv.cache.eviction.scores.tokens import ScoredTokens


def value_norm(tokens: ScoredTokens) -> mx.array:
    return Blocks(tokens.values, tokens.value_part).each(lambda block: block.square().sum(axis=-1))
