"""What queries that are still to come would attend to is kept.

Devoto et al. 2025, "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution".
Queries before RoPE are taken for normally distributed, with the mean and covariance of those that were seen, and turned
on as RoPE turns the next 512 positions in the mean. What a token is expected to get of one, the exponential of
mu k / sqrt d + k' S k / 2 d, is made a share of all tokens but the first 4, averaged over the query heads of a group,
and multiplied by the norm of the token's value. The first 4 tokens score more than any other. It looks at no question,
so it is right for texts that are read once and asked about often. As long as no query was seen, it scores as key_diff.
"""

import mlx.core as mx

from mlx_kv.cache.eviction.scores.blocks import Blocks
from mlx_kv.cache.eviction.scores.key_diff import key_diff
from mlx_kv.cache.eviction.scores.last_queries import above_all
from mlx_kv.cache.eviction.scores.tokens import ScoredTokens
from mlx_kv.cache.eviction.scores.wants import Wants

FIRST = 4
WANTS = Wants(moments=True)


def expected_attention(tokens: ScoredTokens) -> mx.array:
    moments, scale = tokens.moments, tokens.scale
    if moments is None or scale is None:
        return key_diff(tokens)
    rows, heads, n, dim = tokens.keys.shape
    mean = (moments.ahead @ moments.mean[..., None]).reshape(rows, heads, -1, dim)  # (B, H, g, D)
    turned = moments.ahead @ moments.covariance @ moments.ahead.T
    covariance = turned.reshape(rows, heads, -1, dim, dim)

    def expected(keys: mx.array) -> mx.array:  # (B, H, g, some)
        along = (keys @ mean.swapaxes(2, 3)).swapaxes(2, 3) * scale
        spread = ((keys[:, :, None] @ covariance) * keys[:, :, None]).sum(axis=-1)
        return along + spread * (scale * scale / 2)

    keys, values = Blocks(tokens.keys, tokens.key_part), Blocks(tokens.values, tokens.value_part)
    logits = mx.concatenate(list(keys.evaluated(map(expected, keys))), axis=3)
    first = mx.broadcast_to(tokens.positions < FIRST, (rows, heads, n))
    shares = mx.softmax(mx.where(first[:, :, None], -mx.inf, logits), axis=-1).mean(axis=2)
    norms = values.each(lambda block: mx.linalg.norm(block, axis=-1))
    return above_all(mx.where(first, 0, shares * norms), first)
