"""What the last 64 tokens attend to is kept, and its neighbours with it.

Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation". The attention of the last 64 queries, in
the mean over them, averaged over 5 neighbouring tokens and over the query heads of a group. Their own tokens score more
than any other; they lend their neighbours nothing, and at both ends the text is followed by zeros. Right when the
question has been read. As long as no query was seen, it scores as key_diff.
"""

import mlx.core as mx

from mlx_kv.cache.eviction.scores.key_diff import key_diff
from mlx_kv.cache.eviction.scores.last_queries import above_all, mean_attention, own_tokens
from mlx_kv.cache.eviction.scores.tokens import ScoredTokens
from mlx_kv.cache.eviction.scores.wants import Wants

WINDOW, KERNEL = 64, 5
WANTS = Wants(queries=WINDOW)


def snap_kv(tokens: ScoredTokens) -> mx.array:
    if tokens.queries is None:
        return key_diff(tokens)
    rows, heads, n, _ = tokens.keys.shape
    attention = mean_attention(tokens).reshape(rows, heads, -1, n).mean(axis=2)
    own = mx.broadcast_to(own_tokens(tokens), attention.shape)
    order = mx.argsort(mx.broadcast_to(tokens.positions, attention.shape), axis=-1)  # live tokens lie in any order
    in_order = mx.take_along_axis(mx.where(own, 0, attention), order, axis=-1)
    padded = mx.pad(in_order, [(0, 0), (0, 0), (KERNEL // 2, KERNEL // 2)])
    pooled = sum((padded[:, :, shift : shift + n] for shift in range(KERNEL)), mx.zeros(1)) / KERNEL
    return above_all(mx.put_along_axis(mx.zeros_like(pooled), order, pooled, axis=-1), own)
