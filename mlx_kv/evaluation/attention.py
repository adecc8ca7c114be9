"""The attention that tokens of a context receive, and how alike two rankings of them are.

Decides what counts of attention weights, which mlx-lm shows to nobody; where they can be seen, `mlxlm.attention` knows.
Knows nothing about scores or budgets.
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
from mlx_kv.evaluation.reading import Progress
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
    """Writes down what each call of attention gives to each token of its cache, (B, H, N): the mean over the query
    heads of a KV head, the sum over queries."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, mx.array]] = []

    def attend(self, call: AttentionCall) -> mx.array:
        if isinstance(call.keys, mx.array):  # packed planes have no keys to look at
            weights = attention_weights(call.queries, call.keys, call.scale, call.mask).sum(axis=2)  # (B, Hq, N)
            received = weights.reshape(weights.shape[0], call.keys.shape[1], -1, weights.shape[2]).mean(axis=2)
            mx.eval(received)
            self.seen.append((call.cache, received))
        return call.forward()


@contextlib.contextmanager
def watched_attention(
    model: nn.Module, caches: Sequence[Any], asked_by: str = "the task correlation"
) -> Iterator[list[tuple[Any, mx.array]]]:
    """What each call of attention over these caches gives to each token, while this is open: the cache, and (B, H, N).

    The mean over the query heads of a KV head and the sum over queries, so a row sums to the number of queries.

    Args:
        asked_by: what to leave out where nothing can be seen.

    Raises:
        ValueError: no layer of the model has attention that can be seen.
    """
    check_attention(model, asked_by)
    watcher = _Watcher()
    with attention_hooked(model, caches, watcher):
        yield watcher.seen


def check_attention(model: nn.Module, asked_by: str = "the task correlation") -> None:
    """Raises ValueError where no layer of a model has attention that can be seen."""
    if not attention_modules(model):
        raise ValueError(f"{type(model).__module__} hides its attention: leave out {asked_by}")


def attention_received(model: nn.Module, contexts: np.ndarray, questions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What tokens of contexts (B, C) receive with a full cache, (L, B, C) each.

    Sums over queries: of all tokens that follow and the token itself, and of the questions (B, Q) alone. The first
    favours early tokens, which more tokens follow. Rows are read one after another: weights take Hq x C x C numbers.

    Raises:
        ValueError: a layer's attention cannot be seen.
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
    """What the last tokens of a text look at with a full cache, (H, n) for each of the model's attention caches.

    The mean over queries, so that a row sums to 1. Caches are counted as `attention_caches` counts them; those with a
    window are left out, and those whose attention cannot be seen.

    Args:
        tokens: ids of one sequence.
        queries: so many last tokens look.
        step: tokens read at once.
        progress: called with the tokens read and the tokens in all.

    Raises:
        ValueError: no layer of the model has attention that can be seen; token ids that the model does not have.
    """
    check_attention(model, "--attention")
    tokens = token_ids(tokens, vocabulary_of(model), "the text")
    caches, total = make_prompt_cache(model), len(tokens)
    first = max(0, total - queries)
    for read in range(0, first, step):
        last = min(read + step, first)
        read_chunk(model, caches, mx.array([tokens[read:last]]))
        if progress is not None:
            progress(last, total)
    with watched_attention(model, caches, "--attention") as seen:
        read_chunk(model, caches, mx.array([tokens[first:]]))
    if progress is not None:
        progress(total, total)
    of_cache = {id(cache): np.array(received[0] / (total - first)) for cache, received in seen}
    numbered = enumerate(attention_caches(caches))
    return {i: of_cache[id(cache)] for i, cache in numbered if cache.max_write is None and id(cache) in of_cache}


def ranks(x: np.ndarray) -> np.ndarray:
    """(n,) ranks from 0, the mean of them where values are equal."""
    _, which, counts = np.unique(x, return_inverse=True, return_counts=True)
    mean: np.ndarray = (np.cumsum(counts) - (counts + 1) / 2)[which]
    return mean


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's: Pearson's correlation of the ranks of (n,) and (n,); 0 where one of them is constant."""
    a, b = ranks(a) - (len(a) - 1) / 2, ranks(b) - (len(b) - 1) / 2
    size = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / size) if size else 0.0
