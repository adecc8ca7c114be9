"""Which way to store keys and values is the smallest that a model bears: measured on a text, not believed.

Decides what is tried, in which order, and by what a measurement is found again. Knows nothing about how a loss is
measured, nor about files.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.codecs import in_words
from mlx_kv.evaluation.codec_loss import PLAIN, CodecLoss, bytes_per_token
from mlx_kv.evaluation.reading import Progress
from mlx_kv.policy import CachePolicy

MAX_LOSS = 0.01  # nats a token: a perplexity one percent higher
STORING = {"bits", "group_size", "codec"}  # what a candidate may say
PAIRS = ((4, 4), (5, 4), (6, 4), (8, 4), (6, 6), (8, 8))  # bits of keys and of values
CANDIDATES = tuple(
    CachePolicy(bits=pair, group_size=group, codec=codec)
    for pair, group, codec in product(PAIRS, (64, 32), (None, "rotated"))
)
Measure = Callable[[CachePolicy], float]


class Numbers(Protocol):
    """Where measurements are looked up, and put, by subject and name: `files.remembered.Remembered` is such a place."""

    def number(self, subject: str, name: str) -> float | None: ...

    def remember(self, subject: str, name: str, number: float) -> bool: ...


def choose_bits(
    model: nn.Module,
    tokens: Sequence[int],
    max_loss: float = MAX_LOSS,
    *,
    candidates: Iterable[CachePolicy] = CANDIDATES,
    measure: Measure | None = None,
    remembered: Numbers | None = None,
    fingerprint: str = "",
    progress: Progress | None = None,
) -> CachePolicy:
    """The policy with the fewest bytes a token that a model bears; a plain one where it bears none.

    Candidates are tried from the smallest up, those that are as small as others in the order in which they are given;
    the first that a model bears is taken. What cannot store its head dims, or is not smaller than plain, is not tried.

    Args:
        tokens: of a text such as the model is to read; some thousands say more than a hundredth of a nat.
        max_loss: nats a token that may be added.
        candidates: policies that say nothing but how tensors are stored.
        measure: the nats that a policy adds on this text; None measures them, by `CodecLoss`.
        remembered: where measurements are looked up, and put; None is nowhere.
        fingerprint: of the model, by which they are found again: `files.fingerprint.model_fingerprint`.
        progress: as in `losses`, of each reading.

    Raises:
        ValueError: a max_loss that is no loss, a candidate that says more, or what `losses` refuses of a text.
    """
    if not (math.isfinite(max_loss) and max_loss >= 0):
        raise ValueError(f"max_loss is {max_loss}: give nats a token, 0 or more")
    added = measure or _measuring(model, tokens, progress)
    if remembered is not None:
        if not fingerprint:
            raise ValueError("measurements are remembered by the model: give its fingerprint, or nowhere to remember")
        added = _remembering(added, subject_of(fingerprint, tokens), remembered)
    return next((policy for _, policy in by_size(model, candidates) if added(policy) <= max_loss), PLAIN)


def by_size(model: nn.Module, candidates: Iterable[CachePolicy]) -> list[tuple[int, CachePolicy]]:
    """The candidates that store a token of this model in fewer bytes than plain, with these bytes, smallest first.

    Raises:
        ValueError: a candidate that says more than how tensors are stored.
    """
    plain, found = bytes_per_token(model, PLAIN), []
    for policy in candidates:
        if more := sorted({*policy.changed()} - STORING):
            raise ValueError(f"a candidate says {', '.join(more)}: give {', '.join(sorted(STORING))} alone")
        try:
            size = bytes_per_token(model, policy)
        except ValueError:  # these head dims
            continue
        if size < plain:
            found.append((size, policy))
    return sorted(found, key=lambda pair: pair[0])


def subject_of(fingerprint: str, tokens: Sequence[int]) -> str:
    """A short text for all that a measurement depends on but the policy: model, text, device and versions."""
    versions = [importlib.metadata.version(name) for name in ("mlx-kv", "mlx", "mlx-lm")]
    told = [fingerprint, mx.default_device().type.name, versions, list(map(int, tokens))]
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()


def _measuring(model: nn.Module, tokens: Sequence[int], progress: Progress | None) -> Measure:
    text = CodecLoss(model, tokens, progress=progress)
    return lambda policy: text.added(policy).nats


def _remembering(measure: Measure, subject: str, remembered: Numbers) -> Measure:
    def added(policy: CachePolicy) -> float:
        name = in_words(policy.codecs)
        known = remembered.number(subject, name)
        if known is None:
            known = measure(policy)
            remembered.remember(subject, name, known)
        return known

    return added
