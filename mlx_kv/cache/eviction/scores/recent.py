"""The newest tokens are kept: the position. With sinks, this is StreamingLLM (Xiao et al. 2023)."""

import mlx.core as mx

from mlx_kv.cache.eviction.scores.tokens import ScoredTokens


def recent(tokens: ScoredTokens) -> mx.array:
    return mx.broadcast_to(tokens.positions.astype(mx.float32), tokens.keys.shape[:3])
