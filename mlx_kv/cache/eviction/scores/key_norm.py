"""Keys with a low L2 norm are kept: -||k||.

Devoto, Zhao, Scardapane and Minervini 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression".
Keys of low norm receive much attention. The sign is often told the wrong way round.
"""

import mlx.core as mx

from mlx_kv.cache.eviction.scores.blocks import Blocks
from mlx_kv.cache.eviction.scores.tokens import ScoredTokens


def key_norm(tokens: ScoredTokens) -> mx.array:
    # In float32: in bfloat16, three quarters of the norms of a layer tie.
    return -Blocks(tokens.keys, tokens.key_part).each(lambda block: mx.linalg.norm(block, axis=-1))


def key_norm_high(tokens: ScoredTokens) -> mx.array:
    """The reversed sign: no method, but the control that a good key_norm must beat."""
    return -key_norm(tokens)
