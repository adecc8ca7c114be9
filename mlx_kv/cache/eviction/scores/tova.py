"""What the last token attends to is kept: "token omission via attention".

Oren et al. 2024, "Transformers are Multi-State RNNs". The attention of the last query alone, in the mean over all heads
of a layer, so all of them score alike. Its own token scores more than any other. Right when the question has been read.
As long as no query was seen, it scores as key_diff.
"""

import mlx.core as mx

from mlx_kv.cache.eviction.scores.key_diff import key_diff
from mlx_kv.cache.eviction.scores.last_queries import above_all, mean_attention, own_tokens
from mlx_kv.cache.eviction.scores.tokens import ScoredTokens
from mlx_kv.cache.eviction.scores.wants import Wants

WANTS = Wants(queries=1)


def tova(tokens: ScoredTokens) -> mx.array:
    if tokens.queries is None:
        return key_diff(tokens)
    shape = tokens.keys.shape[:3]
    attention = mx.broadcast_to(mean_attention(tokens).mean(axis=1, keepdims=True), shape)
    return above_all(attention, mx.broadcast_to(own_tokens(tokens), shape))
