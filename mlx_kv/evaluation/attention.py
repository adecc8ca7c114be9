"""The attention that tokens of a context receive, and the rank correlation of two rankings of them.

B rows, Hq query heads, H KV heads, S queries, N tokens, C tokens of context, L layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.cache.checks import token_ids
from mlx_kv.evaluation.reading import Progress, read
from mlx_kv.generation.prefill import read_chunk
from mlx_kv.mlxlm.attention import AttentionCall, attention_hooked, attention_modules
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.loading import vocabulary_of
from mlx_kv.mlxlm.traverse import attention_caches


def attention_weights(queries: mx.array, keys: mx.array, scale: float, mask: Any = None) -> mx.array:
    """softmax(scale q k + mask) in float32: queries (B, Hq, S, D), keys (B, H, N, D), to (B, Hq, S, N).

    Args:
        mask: "causal" (the queries are the last S of N tokens), an array of bool or of addends, or None.
    """
    queries, keys = queries.astype(mx.float32), keys.astype(mx.float32)
    products = scale * (queries @ mx.repeat(keys, queries.shape[1] // keys.shape[1], axis=1).swapaxes(2, 3))
    if isinstance(mask, str):
        s, n = products.shape[2:]
        mask = mx.arange(n) <= mx.arange(n - s, n)[:, None]
    if mask is not None:
        products = mx.where(mask, products, -mx.inf) if mask.dtype == mx.bool_ else products + mask
    return mx.softmax(products, axis=-1)


class _Watcher:
    """Records the attention that each call gives to the tokens of its cache, (B, H, N): the mean over the query heads
    of a KV head, the sum over queries."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, mx.array]] = []

    def attend(self, call: AttentionCall) -> mx.array:
        if isinstance(call.keys, mx.array):  # not packed
            weights = attention_weights(call.queries, call.keys, call.scale, call.mask).sum(axis=2)  # (B, Hq, N)
            received = weights.reshape(weights.shape[0], call.keys.shape[1], -1, weights.shape[2]).mean(axis=2)
            mx.eval(received)
            self.seen.append((call.cache, received))
        return call.forward()


@contextlib.contextmanager
def watched_attention(
    model: nn.Module, caches: Sequence[Any], needed_for: str = "the task correlation"
) -> Iterator[list[tuple[Any, mx.array]]]:
    """Records, while it is open, each attention call over these caches: the cache and the attention received (B, H, N).

    The mean over the query heads of a KV head and the sum over queries, so a row sums to the number of queries.

    Args:
        needed_for: what to leave out, for the error message.

    Raises:
        ValueError: no layer of the model exposes its attention.
    """
    check_attention(model, needed_for)
    watcher = _Watcher()
    with attention_hooked(model, caches, watcher):
        yield watcher.seen


def check_attention(model: nn.Module, needed_for: str = "the task correlation") -> None:
    """Raises ValueError where no layer of a model exposes its attention."""
    if not attention_modules(model):
        raise ValueError(f"{type(model).__module__} hides its attention: leave out {needed_for}")


def attention_received(model: nn.Module, contexts: np.ndarray, questions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The attention that tokens of contexts (B, C) receive with a full cache, two arrays (L, B, C).

    Sums over queries: over the token itself and all that follow, which favours early tokens, and over the questions
    (B, Q) alone. Rows are read one at a time: weights take Hq x C x C numbers.

    Raises:
        ValueError: a layer does not expose its attention.
    """
    length, rows = contexts.shape[1], []
    for parts in zip(contexts, questions, strict=True):
        caches = make_prompt_cache(model)
        layers = [id(cache) for cache in attention_caches(caches) if cache.max_write is None]  # of full attention
        received = []
        for tokens in parts:
            with watched_attention(model, caches) as seen:
                mx.eval(model(mx.array(tokens)[None], cache=caches))
            given = {id(cache): np.array(weights[0, :, :length].mean(axis=0)) for cache, weights in seen}
            if not layers or not given.keys() >= set(layers):
                raise ValueError("this model's attention cannot be seen in every layer: leave out the task correlation")
            received.append(np.stack([given[layer] for layer in layers]))
        rows.append(np.stack([received[0] + received[1], received[1]]))
    of_all, of_questions = np.stack(rows, axis=2)
    return of_all, of_questions


def attention_of_last(
    model: nn.Module, tokens: Sequence[int], queries: int = 64, step: int = 512, progress: Progress | None = None
) -> dict[int, np.ndarray]:
    """The attention from the last tokens of a text to all of its tokens, with a full cache.

    Args:
        tokens: n ids of one sequence.
        queries: number of last tokens.
        step: tokens read at once.
        progress: called with the tokens read and the tokens in all.

    Returns:
        (H, n) by the index of each cache in `attention_caches`: the mean over queries, so a row sums to 1. Caches with
        a window are left out, and those whose layer does not expose its attention.

    Raises:
        ValueError: no layer of the model exposes its attention; token ids outside the vocabulary.
    """
    check_attention(model, "--attention")
    tokens = token_ids(tokens, vocabulary_of(model), "the text")
    caches, total = make_prompt_cache(model), len(tokens)
    first = max(0, total - queries)
    read(model, caches, mx.array([tokens[:first]]), step, None if progress is None else lambda n, _: progress(n, total))
    with watched_attention(model, caches, "--attention") as seen:
        read_chunk(model, caches, mx.array([tokens[first:]]))
    if progress is not None:
        progress(total, total)
    of_cache = {id(cache): np.array(received[0] / (total - first)) for cache, received in seen}
    numbered = enumerate(attention_caches(caches))
    return {i: of_cache[id(cache)] for i, cache in numbered if cache.max_write is None and id(cache) in of_cache}


def ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from 0, (n,); equal values share the mean of their ranks."""
    _, index, counts = np.unique(x, return_inverse=True, return_counts=True)
    mean: np.ndarray = (np.cumsum(counts) - (counts + 1) / 2)[index]
    return mean


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's correlation of (n,) and (n,): Pearson's of their ranks; 0 where one of them is constant."""
    a, b = ranks(a) - (len(a) - 1) / 2, ranks(b) - (len(b) - 1) / 2
    size = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / size) if size else 0.0
