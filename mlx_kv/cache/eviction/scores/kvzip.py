"""What a repetition of the text looks at is kept: the largest attention that a token received when it was read again.

Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction". Nobody's question is looked
at, so what is kept suits all that may be asked. Tokens that were not read again, as those of an answer, are all worth
more than any that were; of them the older goes. How a text is read again: `generation.rereading`.
"""

import mlx.core as mx

from mlx_kv.cache.eviction.scores.tokens import ScoredTokens

SCORE_OF_UNREAD = 2.0  # more than any share of attention


def kvzip(tokens: ScoredTokens) -> mx.array:
    received = tokens.reread
    if received is None:
        return mx.full(tokens.keys.shape[:3], SCORE_OF_UNREAD)
    return mx.where(received < 0, SCORE_OF_UNREAD, received)
