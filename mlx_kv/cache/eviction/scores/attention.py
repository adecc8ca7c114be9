"""Scores that are calculated from attention: from queries that were observed, or from what each token received.

Each is a function of n tokens of B rows and H KV heads, (tokens) -> (B, H, n), float32; higher is kept. Until a query
is observed, they score as key_diff. Hq query heads.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_kv.cache.eviction.scores.stored import key_diff
from mlx_kv.cache.eviction.scores.tokens import Blocks, ScoredTokens, some
from mlx_kv.cache.eviction.weights import Keys, Queries, mean_weights

SNAP_QUERIES, SNAP_KERNEL = 64, 5  # snap_kv: the last queries, and neighbouring tokens that a mean is over
EXPECTED_FIRST = 4  # expected_attention: so many of the first tokens are kept
SCORE_OF_UNREAD = 2.0  # kvzip: more than any share of attention

# --- the last queries -------------------------------------------------------------------------------------------------


def tova(tokens: ScoredTokens) -> mx.array:
    """Keeps what the last token attends to: "token omission via attention".

    Oren et al. 2024, "Transformers are Multi-State RNNs". The attention of the last query alone, in the mean over all
    heads of a layer, so all of them score alike. Its own token scores more than any other. Right when the question has
    been read.
    """
    if tokens.queries is None:
        return key_diff(tokens)
    shape = tokens.keys.shape[:3]
    attention = mx.broadcast_to(_mean_attention(tokens).mean(axis=1, keepdims=True), shape)
    return _above_all(attention, mx.broadcast_to(_own_tokens(tokens), shape))


def snap_kv(tokens: ScoredTokens) -> mx.array:
    """Keeps what the last 64 tokens attend to, and its neighbours.

    Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation". The attention of the last 64
    queries, in the mean over them, averaged over 5 neighbouring tokens and over the query heads of a group. Their own
    tokens score more than any other; they count as 0 in the means of their neighbours, as does what lies beyond both
    ends of the text. Right when the question has been read.
    """
    if tokens.queries is None:
        return key_diff(tokens)
    rows, heads, n, _ = tokens.keys.shape
    attention = _mean_attention(tokens).reshape(rows, heads, -1, n).mean(axis=2)
    own = mx.broadcast_to(_own_tokens(tokens), attention.shape)
    order = mx.argsort(mx.broadcast_to(tokens.positions, attention.shape), axis=-1)  # live tokens lie in any order
    in_order = mx.take_along_axis(mx.where(own, 0, attention), order, axis=-1)
    padded = mx.pad(in_order, [(0, 0), (0, 0), (SNAP_KERNEL // 2, SNAP_KERNEL // 2)])
    pooled = sum((padded[:, :, shift : shift + n] for shift in range(SNAP_KERNEL)), mx.zeros(1)) / SNAP_KERNEL
    return _above_all(mx.put_along_axis(mx.zeros_like(pooled), order, pooled, axis=-1), own)


def _mean_attention(tokens: ScoredTokens) -> mx.array:
    """(B, Hq, n): the attention that a token receives, averaged over the queries."""
    assert tokens.queries is not None
    assert tokens.query_positions is not None
    assert tokens.scale is not None
    part = tokens.key_part
    keys = Keys(tokens.keys.shape, part or (lambda which: some(tokens.keys, which)), tokens.positions, part is not None)
    return mean_weights(Queries(tokens.queries, tokens.query_positions, tokens.scale, tokens.attention_sinks), keys)


def _own_tokens(tokens: ScoredTokens) -> mx.array:
    """(B, 1 or H, n): whether a token is one of those of the queries."""
    assert tokens.query_positions is not None
    return tokens.positions >= tokens.query_positions[:, None, :1]


def _above_all(scores: mx.array, which: mx.array) -> mx.array:
    """The same scores (B, H, n), but more than any other of its head for some tokens (B, 1 or H, n).

    It reads no other heads, which may be on another machine.
    """
    others = mx.where(which, -mx.inf, scores).max(axis=2, keepdims=True)
    return mx.where(which, mx.maximum(others, 0) + 1, scores)


# --- all queries ------------------------------------------------------------------------------------------------------


def h2o(tokens: ScoredTokens) -> mx.array:
    """Keeps what has received much attention so far: "heavy hitters".

    Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models". The sum
    of the attention that a token received, divided by the number of queries that could see it: else the first tokens of
    a text would win by their age alone.
    """
    if tokens.received is None or tokens.observers is None:
        return key_diff(tokens)
    return tokens.received / tokens.observers.astype(mx.float32)


def expected_attention(tokens: ScoredTokens) -> mx.array:
    """Keeps what future queries are expected to attend to.

    Devoto et al. 2025, "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
    Distribution". Queries before RoPE are modelled as normally distributed, with the mean and covariance of those that
    were observed, and rotated by the average RoPE of the next 512 positions. The expected weight of a token, the
    exponential of mu k / sqrt d + k' S k / 2 d, is normalised over all tokens but the first 4, averaged over the query
    heads of a group, and multiplied by the norm of the token's value. The first 4 tokens score more than any other.
    Independent of the question: for texts that are read once and queried often.
    """
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
    first = mx.broadcast_to(tokens.positions < EXPECTED_FIRST, (rows, heads, n))
    shares = mx.softmax(mx.where(first[:, :, None], -mx.inf, logits), axis=-1).mean(axis=2)
    norms = values.each(lambda block: mx.linalg.norm(block, axis=-1))
    return _above_all(mx.where(first, 0, shares * norms), first)


# --- a second pass ----------------------------------------------------------------------------------------------------


def kvzip(tokens: ScoredTokens) -> mx.array:
    """Keeps what a repetition of the text attends to: the largest attention that a token receives in a second pass.

    Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction". Independent of the
    question. Tokens without a second pass, as those of an answer, score more than any other; of them the oldest are
    evicted first. The second pass: `two_pass`.
    """
    received = tokens.reread
    if received is None:
        return mx.full(tokens.keys.shape[:3], SCORE_OF_UNREAD)
    return mx.where(received < 0, SCORE_OF_UNREAD, received)
