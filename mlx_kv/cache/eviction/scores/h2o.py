"""What has received much attention so far is kept: "heavy hitters".

Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models". The sum of
the attention that a token received, divided by the number of queries that could see it: else the first tokens of a text
would win by their age alone. As long as no query was seen, it scores as key_diff.
"""

import mlx.core as mx

from mlx_kv.cache.eviction.scores.key_diff import key_diff
from mlx_kv.cache.eviction.scores.tokens import ScoredTokens
from mlx_kv.cache.eviction.scores.wants import Wants

WANTS = Wants(received=True)


def h2o(tokens: ScoredTokens) -> mx.array:
    if tokens.received is None or tokens.observers is None:
        return key_diff(tokens)
    return tokens.received / tokens.observers.astype(mx.float32)
