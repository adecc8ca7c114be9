"""Tokens with large values are kept: ||v||^2. What a token adds to the output is its value times its attention."""

import mlx.core as mx

from mlx_kv.cache.eviction.scores.blocks import each_block


def value_norm(keys: mx.array, values: mx.array, positions: mx.array) -> mx.array:
    return each_block(lambda block: block.square().sum(axis=-1), values)
