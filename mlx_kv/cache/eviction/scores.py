"""Scores of tokens, higher is kept: their inputs, their formulas, and the names under which they are found.

A score is a function of n tokens of each row and head,

    (tokens: ScoredTokens) -> (B, H, n), float32

with keys, values and positions as its fields. Only the order of what it returns matters; it must be finite. Keys and
values are read in blocks, and so are the queries of scores of attention: the attention matrix is never materialised.
B rows, Hq query heads, H KV heads, g = Hq / H, D head dim; n tokens, m queries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_kv.cache.buffers import on_cpu
from mlx_kv.settings import OpenSet, integer_fields

# Some of the n tokens, a slice of them or indices (B, 1 or H, m), as they were before they were stored: (B, H, m, D).
Part = Callable[[slice | mx.array], mx.array]

# Bytes of one block in float32, of each row and head: so sums are the same in every batch, and however heads are split.
# On a CPU small blocks are no slower, since they stay in its caches; on a GPU each costs a launch.
BLOCK_BYTES = {mx.DeviceType.cpu: 2**15, mx.DeviceType.gpu: 2**19}
MIN_TOKENS = 16
SHORT_BYTES = 2**18  # of each row and head, up to which all tokens are one block
TOGETHER_BYTES = 2**19  # of blocks that are evaluated at once
# Of the weights of one block of queries, for one row and KV head.
WEIGHT_BYTES = {mx.DeviceType.cpu: 2**21, mx.DeviceType.gpu: 2**24}
MIN_QUERIES = 8
DECODED_TOKENS = 1024  # at a time
UNSEEN = -1e30  # a product without weight in a softmax, and finite

MIN_NORM = 1e-12  # key_diff: of a key that is divided by its norm
SNAP_QUERIES, SNAP_KERNEL = 64, 5  # snap_kv: the last queries, and neighbouring tokens that a mean is over
SCORE_OF_UNREAD = 2.0  # kvzip: more than any share of attention

# --- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """What a score uses of attention; see the fields of `ScoredTokens`. Public as `mlx_kv.Wants`.

    Attributes:
        queries: how many of the last queries of each row.
        reread: the attention that each token receives when its text is read a second time.
        received, moments: sums over all queries, which were removed in 0.4.

    Raises:
        ValueError: no input at all, a number of queries below 0, or a sum over all queries.
    """

    queries: int = 0
    received: bool = False
    moments: bool = False
    reread: bool = False

    def __post_init__(self) -> None:
        integer_fields(self, "queries")
        if type(self.queries) is not int or self.queries < 0:
            raise ValueError(f"queries is {self.queries!r}: give a number of queries from 0 up")
        if self.received is not False or self.moments is not False:
            raise ValueError("sums over all queries (received, moments) were removed in 0.4: use queries=N or reread")
        if not (self.queries or self.reread):
            raise ValueError("wants nothing: for a score that does not use attention, give wants=None")

    @property
    def observes(self) -> bool:
        """Whether attention is observed while a text is read for the first time."""
        return bool(self.queries)


Wants = AttentionInputs  # the public name


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredTokens:
    """Tokens to be scored, n of each row and head, in no particular order. New inputs are added as fields.

    Attributes:
        keys: (B, H, n, Dk), in the dtype of the model, positions rotated in.
        values: (B, H, n, Dv).
        positions: (B, 1, n) of int32, or (B, H, n) where every head keeps its own tokens, once any were evicted.
        key_part, value_part: the same keys and values, some of them at a time. Evaluated one part after the other, they
            are never all decoded, or in float32, at once.
        layer: which of the model's layers of full attention they are of, from 0.
        queries: (B, Hq, w, D), the last ones, after RoPE; fewer where fewer were observed. This and all that
            follows is None unless the score uses it (`wants=`), and where nothing was observed yet: in a cache of a
            file without it, or right after a longer trim than the observation can follow.
        query_positions: (B, w) of int32.
        scale: of the products of queries and keys.
        attention_sinks: (Hq,), logits that weights are divided by beside those of tokens, where the model has them.
        reread: (B, H, n) of float32, for scores that want it: the largest share of attention that each token got when
            its text was read a second time; -1 of tokens without a second pass, and never None.
    """

    keys: mx.array
    values: mx.array
    positions: mx.array
    key_part: Part | None = None
    value_part: Part | None = None
    layer: int = 0
    queries: mx.array | None = None
    query_positions: mx.array | None = None
    scale: float | None = None
    attention_sinks: mx.array | None = None
    reread: mx.array | None = None


# --- keys and values in blocks ----------------------------------------------------------------------------------------


class Blocks:
    """The keys, or the values, of n tokens in float32, a block of axis 2 at a time, without a second copy of all.

    Args:
        x: all of them, (B, H, n, D); only its shape is used where there is a `part`.
        part: reads some of them.
    """

    def __init__(self, x: mx.array, part: Part | None = None) -> None:
        self.rows, self.heads, self.n, self.dim = x.shape
        self._part: Part = part or (lambda which: take_tokens(x, which))

    @property
    def tokens(self) -> int:
        """Tokens of one block."""
        if 4 * self.n * self.dim <= SHORT_BYTES:
            return self.n
        return max(MIN_TOKENS, BLOCK_BYTES[mx.default_device().type] // (4 * self.dim))

    def __iter__(self) -> Iterator[mx.array]:
        for first in range(0, self.n, self.tokens):
            yield self._part(slice(first, first + self.tokens)).astype(mx.float32)

    def each(self, function: Callable[[mx.array], mx.array]) -> mx.array:
        """`function` of each block, (B, H, n); its value for a token must not depend on other tokens."""
        return mx.concatenate(list(self.evaluate(map(function, self))), axis=2)

    def evaluate(self, arrays: Iterator[mx.array]) -> Iterator[mx.array]:
        """Results of each block, evaluated before more are made, so that the block is freed."""
        return evaluate_together(arrays, 4 * self.rows * self.heads * self.tokens * self.dim)


def evaluate_together(
    arrays: Iterable[mx.array], nbytes: int, limit: int = TOGETHER_BYTES, at_once: bool = False
) -> Iterator[mx.array]:
    """The same arrays, evaluated several at a time, which bounds the peak of memory.

    Args:
        nbytes: that each is made of.
        limit: bytes that those evaluated at once are made of.
        at_once: as soon as there are so many; else before the next array is made, and the last are left to the caller.
    """
    together: list[mx.array] = []
    for array in arrays:
        if at_once:
            together.append(array)
        if len(together) == max(1, limit // nbytes):
            mx.eval(together)
            together.clear()
        if not at_once:
            together.append(array)
        yield array


def take_tokens(x: mx.array, which: slice | mx.array) -> mx.array:
    """Some tokens of (B, H, n, D), as a `Part` returns them."""
    if isinstance(which, slice):
        return x[:, :, which]
    return mx.take_along_axis(
        x, mx.broadcast_to(which[..., None], (*x.shape[:2], *which.shape[2:], x.shape[3])), axis=2
    )


# --- weights of attention ---------------------------------------------------------------------------------------------


class Keys(NamedTuple):
    """The keys of a cache.

    Attributes:
        shape: (B, H, n, D).
        part: some of the tokens, (B, H, some, D), decoded.
        positions: (B, 1 or H, n), below 0 where there is no token.
        encoded: whether reading them decodes them.
    """

    shape: tuple[int, ...]
    part: Callable[[slice], mx.array]
    positions: mx.array
    encoded: bool = False


class Queries(NamedTuple):
    """Queries of all rows.

    Attributes:
        queries: (B, Hq, m, D), after RoPE.
        positions: (B, m), below 0 where there is no query.
        scale: of the products.
        sinks: (Hq,), logits of attention sinks, or None.
    """

    queries: mx.array
    positions: mx.array
    scale: float
    sinks: mx.array | None = None

    def columns(self, first: int, last: int) -> Queries:
        return self._replace(queries=self.queries[:, :, first:last], positions=self.positions[:, first:last])


def blocks(queries: Queries, keys: Keys) -> Iterator[tuple[int, int]]:
    """The columns [first, last) of each block of queries."""
    width, group = queries.queries.shape[2], queries.queries.shape[1] // keys.shape[1]
    count = WEIGHT_BYTES[mx.default_device().type] // (4 * max(1, group * keys.shape[2]))
    count = max(MIN_QUERIES, 1 << max(0, count.bit_length() - 1))
    for first in range(0, width, count):
        yield first, min(width, first + count)


def products(queries: Queries, keys: Keys) -> mx.array:
    """Scaled products of queries and keys, (B, H, g, m, n) in float32; `UNSEEN` where a query does not see a token."""
    rows, heads, n, dim = keys.shape
    scaled = queries.queries.astype(mx.float32) * queries.scale
    count = scaled.shape[2]
    scaled = scaled.reshape(rows, heads, -1, dim)  # (B, H, g * m, D)
    step = DECODED_TOKENS if keys.encoded else n
    parts = [
        scaled @ keys.part(slice(first, first + step)).astype(mx.float32).swapaxes(2, 3) for first in range(0, n, step)
    ]
    scores = (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=3)).reshape(rows, heads, -1, count, n)
    positions = keys.positions[:, :, None, None]  # (B, 1 or H, 1, 1, n)
    seen = (positions >= 0) & (positions <= queries.positions[:, None, None, :, None])
    if not on_cpu():
        return mx.where(seen, scores, UNSEEN)
    # In place, evaluated: `mx.where` takes as long as the products do, and most tokens are seen by all queries.
    view, visible = np.array(scores, copy=False), np.array(seen, copy=False)
    columns = np.flatnonzero(~visible.all(axis=(0, 1, 2, 3)))
    if columns.size:
        view[..., columns] = np.where(visible[..., columns], view[..., columns], np.float32(UNSEEN))
    return scores


def log_sums(products: mx.array, sinks: mx.array | None) -> mx.array:
    """Log-sum-exps, (B, H, g, m), of products (B, H, g, m, n)."""
    largest = products.max(axis=-1, keepdims=True)
    centred = products - largest
    # On a CPU by NumPy, evaluated: 1 ns per number, where MLX takes 20.
    powers = mx.array(np.exp(np.array(centred, copy=False))) if on_cpu() else mx.exp(centred)
    sums = largest[..., 0] + mx.log(powers.sum(axis=-1))
    if sinks is None:
        return sums
    return mx.logaddexp(sums, sinks.astype(mx.float32).reshape(1, *sums.shape[1:3], 1))


def mean_weights(queries: Queries, keys: Keys) -> mx.array:
    """(B, Hq, n): the weight of each token, averaged over all queries. Evaluated block by block."""
    rows, _heads, n, _dim = keys.shape
    total = mx.zeros((rows, queries.queries.shape[1], n))
    for first, last in blocks(queries, keys):
        block = queries.columns(first, last)
        total = total + _summed_weights(products(block, keys), queries.sinks).reshape(rows, -1, n)
        mx.eval(total)
    return total / queries.queries.shape[2]


def _summed_weights(products: mx.array, sinks: mx.array | None) -> mx.array:
    """(B, H, g, n): the weights of each token, summed over queries, of products (B, H, g, m, n).

    On a CPU by NumPy, in place of the products, which are not used again: its exponential and maximum are several times
    as fast, and new memory costs more than the computation.
    """
    cpu = on_cpu()
    logits: Any = np.array(products, copy=False) if cpu else products
    largest = logits.max(axis=-1, keepdims=True)
    logits -= largest
    parts = np.exp(logits, out=logits) if cpu else mx.exp(logits)
    whole = parts.sum(axis=-1)  # (B, H, g, m)
    if sinks is not None:
        sink_logits = sinks.astype(mx.float32).reshape(1, *whole.shape[1:3], 1)
        shifted = np.array(sink_logits) - largest[..., 0] if cpu else sink_logits - largest[..., 0]
        whole = whole + (np.exp(shifted) if cpu else mx.exp(shifted))
    return mx.array(((1 / whole)[..., None, :] @ parts)[..., 0, :])


# --- of keys and positions --------------------------------------------------------------------------------------------


def key_diff(tokens: ScoredTokens) -> mx.array:
    """Keys that differ from the usual direction are kept: -cos(k, mean over tokens of k / ||k||).

    Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments". The mean is over all live tokens, so it changes with what has been evicted.
    """
    keys = Blocks(tokens.keys, tokens.key_part)
    scales: list[mx.array] = []  # of each block, 1 / ||k||

    # Two passes over the keys, as matrix products.
    def sums() -> Iterator[mx.array]:
        anchor = mx.zeros((keys.rows, keys.heads, 1, keys.dim))
        for block in keys:
            scales.append(mx.rsqrt(mx.maximum(block.square().sum(axis=-1), MIN_NORM**2)))
            yield (anchor := anchor + scales[-1][:, :, None] @ block)

    *_, anchor = keys.evaluate(sums())
    direction = (anchor / mx.maximum(mx.linalg.norm(anchor, axis=-1, keepdims=True), MIN_NORM)).swapaxes(2, 3)
    return keys.each(lambda block: (block @ -direction)[..., 0]) * mx.concatenate(scales, axis=2)


def key_norm(tokens: ScoredTokens) -> mx.array:
    """Keys with a low L2 norm are kept: -||k||.

    Devoto, Zhao, Scardapane and Minervini 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache
    Compression". Keys of low norm receive much attention. The sign is often given the wrong way round.
    """
    # In float32: in bfloat16, three quarters of the norms of a layer tie.
    return -Blocks(tokens.keys, tokens.key_part).each(lambda block: mx.linalg.norm(block, axis=-1))


def key_norm_high(tokens: ScoredTokens) -> mx.array:
    """The reversed sign: no method, but the control that a good key_norm must beat."""
    return -key_norm(tokens)


def recent(tokens: ScoredTokens) -> mx.array:
    """The newest tokens are kept: the position. With sinks, this is StreamingLLM (Xiao et al. 2023)."""
    return mx.broadcast_to(tokens.positions.astype(mx.float32), tokens.keys.shape[:3])


def random(tokens: ScoredTokens, seed: int = 0) -> mx.array:
    """Any token may go: a number in [0, 1) drawn from the token's position. The control of every comparison.

    The same everywhere for the same position: copies, loaded caches, layers and heads agree without any state, also
    where the heads of a layer are split over machines. The hash is the finaliser of MurmurHash3 (Appleby 2011).
    """
    rows, heads, n, _ = tokens.keys.shape
    x = tokens.positions.astype(mx.uint32) * mx.array(2654435761, mx.uint32) + seed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> shift)) * mx.array(factor, mx.uint32)
    return mx.broadcast_to((x >> 8).astype(mx.float32) / 2**24, (rows, heads, n))


# --- of attention: key_diff, until a query is observed ----------------------------------------------------------------


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
    newest = mx.broadcast_to(_own_tokens(tokens), attention.shape)
    order = mx.argsort(mx.broadcast_to(tokens.positions, attention.shape), axis=-1)  # live tokens lie in any order
    in_order = mx.take_along_axis(mx.where(newest, 0, attention), order, axis=-1)
    padded = mx.pad(in_order, [(0, 0), (0, 0), (SNAP_KERNEL // 2, SNAP_KERNEL // 2)])
    pooled = sum((padded[:, :, shift : shift + n] for shift in range(SNAP_KERNEL)), mx.zeros(1)) / SNAP_KERNEL
    return _above_all(mx.put_along_axis(mx.zeros_like(pooled), order, pooled, axis=-1), newest)


def _mean_attention(tokens: ScoredTokens) -> mx.array:
    """(B, Hq, n): the attention that a token receives, averaged over the queries."""
    assert tokens.queries is not None
    assert tokens.query_positions is not None
    assert tokens.scale is not None
    part = tokens.key_part
    keys = Keys(
        tokens.keys.shape, part or (lambda which: take_tokens(tokens.keys, which)), tokens.positions, part is not None
    )
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


def kvzip(tokens: ScoredTokens) -> mx.array:
    """Keeps what a repetition of the text attends to: the largest attention that a token receives in a second pass.

    Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction". Independent of the
    question. Tokens without a second pass, as those of an answer, score more than any other; of them the oldest are
    evicted first. The second pass: `scoring.SecondPass`.
    """
    received = tokens.reread
    if received is None:
        return mx.full(tokens.keys.shape[:3], SCORE_OF_UNREAD)
    return mx.where(received < 0, SCORE_OF_UNREAD, received)


# --- names ------------------------------------------------------------------------------------------------------------


Function = Callable[[ScoredTokens], mx.array]


@dataclass(frozen=True)
class Score:
    """A score function and its properties.

    Attributes:
        name: by which it is found, also when a saved cache is loaded.
        function: (tokens) -> (B, H, n), float32.
        per_token: whether the score of a token depends only on itself and its neighbours in the text. Then it is
            computed once, for runs of new tokens in order; otherwise for all live tokens at every compaction.
        wants: what it uses of attention; None where it uses only keys, values and positions.

    Raises:
        ValueError: a function that cannot be called with one argument, or one of attention that is per_token.
    """

    name: str
    function: Function
    per_token: bool = False
    wants: AttentionInputs | None = None

    def __post_init__(self) -> None:
        if self.per_token and self.wants is not None and self.wants.observes:
            raise ValueError(
                f"the score {self.name} wants to see attention, which changes with what follows a token: "
                "leave per_token out"
            )
        if not callable(self.function):
            raise ValueError(f"the score {self.name} is {self.function!r}: give a function (tokens) -> (B, H, n)")
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # not written in Python
            return
        try:
            signature.bind(None)
        except TypeError:
            takes = ", ".join(signature.parameters)
            raise ValueError(
                f"the score {self.name} takes ({takes}): a score takes one argument (tokens), of which tokens.keys, "
                "tokens.values and tokens.positions are known"
            ) from None


OURS = (
    Score("key_diff", key_diff),
    Score("key_norm", key_norm, per_token=True),
    Score("key_norm_high", key_norm_high, per_token=True),
    Score("kvzip", kvzip, per_token=True, wants=AttentionInputs(reread=True)),
    Score("random", random, per_token=True),
    Score("recent", recent, per_token=True),
    Score("snap_kv", snap_kv, wants=AttentionInputs(queries=SNAP_QUERIES)),
    Score("tova", tova, wants=AttentionInputs(queries=1)),
)
REMOVED = {  # in 0.4, and what to use instead
    "expected_attention": "{score:='kvzip'} or a calibration (mlx-kv calibrate)",
    "h2o": "{score:='snap_kv'} or a calibration (mlx-kv calibrate)",
    "key_value": "{score:='key_diff'}",
    "lag_kv": "{score:='key_diff'}",
    "value_norm": "{score:='key_diff'}",
}
SCORES: OpenSet[Score] = OpenSet(
    "score",
    "a function",
    {score.name: score for score in OURS},
    lambda name, loaded: loaded if isinstance(loaded, Score) else Score(name, loaded),
    REMOVED,
)
MEASURED: dict[str, Score] = {}  # of calibrations, by name: loaded caches find them, and no list of names has them


def score_names() -> list[str]:
    """The names that `score=` takes."""
    return SCORES.names()


def register_score(name: str, function: Function, per_token: bool = False, wants: Wants | None = None) -> None:
    """Registers a score under a name, for `score=` and for loaded caches.

    Args:
        name: replaces a score of the same name.
        function: (tokens: ScoredTokens) -> (B, H, n), float32, finite; higher is kept.
        per_token: whether a token's score depends only on itself and its neighbours in the text: then it is computed
            once.
        wants: what it uses of attention; None is nothing.

    Raises:
        ValueError: a function that cannot be called with one argument, one of attention that is per_token, or a name
            that is not a string.
    """
    if not isinstance(name, str):
        raise ValueError(f"the name of a score is {name!r}: give a text")
    SCORES.registered[name] = Score(name, function, per_token, wants)


def find_score(score: str | Function | Score) -> Score:
    """The score of a name, or of a callable, which then scores all live tokens at every compaction.

    Raises:
        ValueError: no score has this name, or a function that cannot be called with one argument.
    """
    if isinstance(score, Score):
        return score
    if isinstance(score, str) and score == "fitted":
        raise ValueError(
            "the score 'fitted' is measured for each model: run mlx-kv calibrate MODEL, and use "
            "CachePolicy(calibration=mlx_kv.load_calibration(FILE))"
        )
    if callable(score):
        name = getattr(score, "__qualname__", type(score).__qualname__)
        return Score(f"{getattr(score, '__module__', '')}.{name}", score)
    if isinstance(score, str) and score in MEASURED:
        return MEASURED[score]
    return SCORES.find(score)
