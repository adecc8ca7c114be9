"""Tokens whose key and value both stand out among their neighbours are kept: ||k||^2 ||v||^2, each over its local mean.

Sengupta, Chaudhary and Chakraborty 2025, "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition",
with the local approximation of its leverage scores, in windows of 16 tokens. A mean rather than the published sum, so
that tokens of a window of which only a part is scored are not worth more than others; in full windows it is the same
order.
"""

import mlx.core as mx

from mlx_kv.cache.eviction.scores.blocks import Blocks
from mlx_kv.cache.eviction.scores.tokens import ScoredTokens

WINDOW = 16


def key_value(tokens: ScoredTokens) -> mx.array:
    keys, values = Blocks(tokens.keys, tokens.key_part), Blocks(tokens.values, tokens.value_part)
    return _over_local_mean(keys) * _over_local_mean(values)


def _over_local_mean(x: Blocks) -> mx.array:
    energy = x.each(lambda block: block.square().sum(axis=-1))  # (B, H, n)
    n = energy.shape[2]
    padding = [(0, 0), (0, 0), (0, -n % WINDOW)]
    counted = mx.pad(mx.ones((1, 1, n)), padding).reshape(1, 1, -1, WINDOW).sum(axis=-1)
    total = mx.pad(energy, padding).reshape(*energy.shape[:2], -1, WINDOW).sum(axis=-1)
    return energy / mx.maximum(mx.repeat(total / counted, WINDOW, axis=2)[:, :, :n], 1e-12)
