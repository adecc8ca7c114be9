"""Tokens whose key and value both stand out among their neighbours are kept: ||k||^2 ||v||^2, each over its local mean.

Sengupta, Chaudhary and Chakraborty 2025, "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition",
with the local approximation of its leverage scores, in windows of 16 tokens. A mean rather than the published sum, so
that tokens of a window of which only a part is scored are not worth more than others; in full windows it is the same
order.
"""

import mlx.core as mx

from mlx_kv.cache.eviction.scores.blocks import each_block
from mlx_kv.cache.eviction.scores.tokens import ScoredTokens

WINDOW = 16


def key_value(tokens: ScoredTokens) -> mx.array:
    return _over_local_mean(tokens.keys) * _over_local_mean(tokens.values)


def _over_local_mean(x: mx.array) -> mx.array:
    energy = each_block(lambda block: block.square().sum(axis=-1), x)  # (B, H, n)
    n = energy.shape[2]
    padding = [(0, 0), (0, 0), (0, -n % WINDOW)]
    counted = mx.pad(mx.ones((1, 1, n)), padding).reshape(1, 1, -1, WINDOW).sum(axis=-1)
    total = mx.pad(energy, padding).reshape(*energy.shape[:2], -1, WINDOW).sum(axis=-1)
    return energy / mx.maximum(mx.repeat(total / counted, WINDOW, axis=2)[:, :, :n], 1e-12)
