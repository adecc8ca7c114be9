"""The attention that tokens of a context receive, and the rank correlation of two rankings of them.

B rows, C tokens of context, n numbers, L layers.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.inspection import watched_attention
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.traverse import attention_caches


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
