"""Ridge regressions of log shares of attention on keys and values, and how many tokens each head needs.

n tokens, F features, H KV heads, L layers. Sums are of float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_kv.cache.eviction.calibration import TINY_SHARE, FittedLayer, features

LAMBDA = 1e-2  # of the penalty, per token; 1e-3 to 5e-2 give the same
KEPT = 0.25  # share of tokens kept by the ranking from which budgets of heads are counted
SINKS, RECENT = 4, 64  # first and last tokens that every head keeps; they are not ranked
MIN_SPREAD = 1e-6  # of a feature relative to its mean; a feature below it is constant


def inputs(layer: FittedLayer, keys: mx.array, values: mx.array) -> np.ndarray:
    """(n, F) of float64: the features of a text that begins at position 0."""
    positions = mx.arange(keys.shape[2])[None, None]
    return np.array(features(layer, keys, values, positions)[0], dtype=np.float64)


def targets(shares: np.ndarray) -> np.ndarray:
    """(n, H) of float64, of shares (H, n)."""
    return np.log(shares.astype(np.float64) + TINY_SHARE).T


class Moments:
    """Sums over tokens for a ridge regression, so that features need not be stored.

    Attributes:
        count: tokens.
        arrays: by name: `shift` (F,), near the mean; `first` (F + H,) and `second` (F, F + H), sums of features minus
            shift and of targets, and of their products.
    """

    def __init__(self, count: int = 0, arrays: dict[str, np.ndarray] | None = None) -> None:
        self.count, self.arrays = count, arrays or {}

    def add(self, f: np.ndarray, y: np.ndarray) -> None:
        """Adds tokens: features (n, F) and targets (n, H)."""
        if not self.arrays:
            sizes = f.shape[1], f.shape[1] + y.shape[1]
            self.arrays = {"shift": f.mean(axis=0), "first": np.zeros(sizes[1]), "second": np.zeros(sizes)}
        z = f - self.arrays["shift"]
        both = np.concatenate([z, y], axis=1)
        self.count += len(f)
        self.arrays["first"] += both.sum(axis=0)
        self.arrays["second"] += z.T @ both

    def ridge(self) -> tuple[np.ndarray, np.ndarray]:
        """Weights (F, H) and bias (H,): y ~ f @ weights + bias, of standardised features.

        w = (Z'Z + LAMBDA n I)^-1 Z'y.
        """
        shift, first, second, n = self.arrays["shift"], self.arrays["first"], self.arrays["second"], self.count
        size, means = len(shift), first / n
        centred = second - np.outer(first[:size], means)  # (F, F + H)
        mean = shift + means[:size]
        std = np.sqrt(np.maximum(np.diag(centred[:, :size]), 0) / n)
        varies = std > MIN_SPREAD * np.maximum(np.abs(mean), MIN_SPREAD)
        std = np.where(varies, std, 1.0)
        gram = np.where(np.outer(varies, varies), centred[:, :size] / np.outer(std, std), 0.0)
        product = np.where(varies[:, None], centred[:, size:] / std[:, None], 0.0)
        weights = np.linalg.solve(gram + LAMBDA * n * np.eye(size), product) / std[:, None]
        return weights, means[size:] - mean @ weights


class Quality(NamedTuple):
    """How well held-out texts are predicted, the mean over heads.

    Attributes:
        r2: explained variance of the log shares.
        spearman: correlation of ranks within a text.
        top_quarter: share of the quarter of a text with the largest shares that is found.
    """

    r2: float
    spearman: float
    top_quarter: float


def quality(predicted: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> Quality:
    """Of held-out texts, (n, H) each."""
    all_predicted, true = np.concatenate(predicted), np.concatenate(actual)
    spread = np.maximum(((true - true.mean(axis=0)) ** 2).sum(axis=0), 1e-12)
    r2 = 1 - ((all_predicted - true) ** 2).sum(axis=0) / spread
    ranks, found = [], []
    for text, shares in zip(predicted, actual, strict=True):
        quarter = max(1, len(text) // 4)
        for p, t in zip(text.T, shares.T, strict=True):
            ranks.append(np.corrcoef(_ranks(p), _ranks(t))[0, 1] if len(p) > 1 else 0.0)
            found.append(len({*np.argsort(-p)[:quarter]} & {*np.argsort(-t)[:quarter]}) / quarter)
    return Quality(float(r2.mean()), float(np.mean(ranks)), float(np.mean(found)))


def _ranks(x: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(x, kind="stable"), kind="stable")


def head_parts(shares: Sequence[np.ndarray], kept: float = KEPT) -> list[np.ndarray]:
    """The share of each head in the tokens that one ranking of all heads and layers keeps: (H,) by layer, of sum 1.

    Args:
        shares: (H, n) of each layer, of one text.
        kept: share of all tokens. `SINKS` and `RECENT` tokens are kept by every head and not counted.
    """
    n = shares[0].shape[1]
    sinks, recent = (SINKS, RECENT) if kept * n >= 2 * (SINKS + RECENT) else (0, 0)  # a short text is ranked whole
    ranked = [layer[:, sinks : n - recent] for layer in shares]
    heads = sum(len(layer) for layer in ranked)
    count = max(1, round(kept * n) - sinks - recent) * heads
    best = np.argsort(-np.concatenate(ranked).reshape(-1), kind="stable")[:count]
    counts = np.bincount(best // ranked[0].shape[1], minlength=heads) / len(best)
    ends = np.cumsum([len(layer) for layer in ranked])
    return np.split(counts, ends[:-1])


def head_table(parts: Sequence[list[np.ndarray]]) -> list[list[float]]:
    """(L, H), the mean over texts of `head_parts`; (L, 1) where layers differ in their heads."""
    layers = [np.mean(texts, axis=0) for texts in zip(*parts, strict=True)]
    if len({len(layer) for layer in layers}) > 1:
        return [[float(layer.mean())] for layer in layers]
    return [[float(part) for part in layer] for layer in layers]
