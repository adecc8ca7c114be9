"""Any token may go: a number in [0, 1) drawn from the token's position. The control of every comparison.

The same everywhere for the same position: copies, loaded caches, layers and heads agree without any state, also where
the heads of a layer are split over machines and none of them knows its number. The hash is the finaliser of MurmurHash3
(Appleby 2011).
"""

import mlx.core as mx

from mlx_kv.cache.eviction.scores.tokens import ScoredTokens


def random(tokens: ScoredTokens, seed: int = 0) -> mx.array:
    rows, heads, n, _ = tokens.keys.shape
    x = tokens.positions.astype(mx.uint32) * mx.array(2654435761, mx.uint32) + seed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> shift)) * mx.array(factor, mx.uint32)
    return mx.broadcast_to((x >> 8).astype(mx.float32) / 2**24, (rows, heads, n))
