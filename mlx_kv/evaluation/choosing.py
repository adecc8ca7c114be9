"""Chooses the smallest codec whose added loss, measured on a text, is within a bound."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.checks import token_ids
from mlx_kv.cache.codecs import in_words
from mlx_kv.evaluation.codec_loss import PLAIN, CodecLoss, bytes_per_token
from mlx_kv.evaluation.questions import python_texts
from mlx_kv.evaluation.reading import Progress
from mlx_kv.files.measurement_cache import MeasurementCache
from mlx_kv.mlxlm.loading import vocabulary_of
from mlx_kv.policy import CachePolicy
from mlx_kv.settings import is_number, shown

MAX_LOSS = 0.01  # nats a token: a perplexity one percent higher
TOKENS = 2048  # of a text
MAX_CHARACTERS = 16  # per token of a text, on average
STORAGE_FIELDS = {"bits", "group_size", "codec", "residual_length"}  # all that a candidate may set
PAIRS = ((4, 4), (5, 4), (6, 4), (8, 4), (6, 6), (8, 8))  # bits of keys and of values
CANDIDATES = tuple(
    CachePolicy(bits=pair, group_size=group, codec=codec)
    for pair, group, codec in product(PAIRS, (64, 32), (None, "rotated"))
)
Measure = Callable[[CachePolicy], tuple[float, float]]


@dataclass(frozen=True)
class Tried:
    """The cost of a candidate.

    Attributes:
        nats: added loss per token, compared with plain caches.
        error: its standard error.
        bytes_per_token: of all layers, scales included.
        measured: whether it was measured now and not read from stored measurements.
        remembered: whether the measurement is stored.
    """

    policy: CachePolicy
    nats: float
    error: float
    bytes_per_token: int
    measured: bool
    remembered: bool

    @property
    def upper_bound(self) -> float:
        """Upper bound of the added loss: one standard error above it; a gain counts as 0."""
        return max(self.nats, 0.0) + self.error


def choose_bits(
    model: nn.Module,
    tokens: Sequence[int],
    max_loss: float = MAX_LOSS,
    *,
    candidates: Iterable[CachePolicy] = CANDIDATES,
    measure: Measure | None = None,
    remembered: MeasurementCache | None = None,
    fingerprint: str = "",
    progress: Progress | None = None,
    tell: Callable[[Tried], None] | None = None,
) -> CachePolicy:
    """The policy with the fewest bytes per token whose added loss is within `max_loss`; plain if there is none.

    Candidates are measured from the smallest up, equally small ones in the order given, and the first whose loss plus
    one standard error is within the bound is taken. A text too short for a small standard error chooses plain, and so
    does a max_loss of 0. Candidates that cannot store the head dims, or that are not smaller than plain, are skipped.

    Args:
        tokens: of a text like those that the model reads; with a few thousand the standard error is below 0.01 nats.
        max_loss: bound of the added loss, in nats per token.
        candidates: policies that set only how tensors are stored.
        measure: returns the nats that a policy adds on this text, and their standard error; None uses `CodecLoss`.
        remembered: stored measurements, read and added to; None stores none.
        fingerprint: of the model, the key of stored measurements: `files.fingerprint.model_fingerprint`.
        progress: as for `losses`; it starts anew for each policy.
        tell: called with each candidate that was measured; the last one is the chosen one, if any is.

    Raises:
        ValueError: a negative max_loss, a candidate that sets anything else, or a text that `losses` refuses.
    """
    if not (is_number(max_loss) and max_loss >= 0):
        raise ValueError(f"max_loss is {shown(max_loss)}: give nats a token, 0 or more")
    if remembered is not None and not fingerprint:
        raise ValueError("measurements are remembered by the model: give its fingerprint, or nowhere to remember")
    tokens = token_ids(tokens, vocabulary_of(model), "the text")
    added, subject = measure or _measuring(model, tokens, progress), subject_of(fingerprint, tokens)
    for size, policy in by_size(model, candidates):
        tried = _try(policy, size, added, subject, remembered)
        if tell is not None:
            tell(tried)
        if tried.upper_bound <= max_loss:
            return policy
    return PLAIN


def usual_text() -> list[str]:
    """The default text: English prose and code, the reference and the library of this Python.

    Raises:
        ValueError: this Python comes without them.
    """
    texts = python_texts()
    return ["\n\n".join(texts.prose), "\n\n".join(function.source for function in texts.functions)]


def tokens_of(tokenizer: Any, parts: Sequence[str], count: int = TOKENS) -> list[int]:
    """At most `count` tokens of a text, equally many of each of its parts; special tokens only at the beginning.

    Args:
        tokenizer: as from `mlx_kv.load`.
    """
    share = count // len(parts)
    beginnings = enumerate(part[: MAX_CHARACTERS * share] for part in parts)
    each = [tokenizer.encode(text, add_special_tokens=not number)[:share] for number, text in beginnings]
    return [int(token) for part in each for token in part]


def by_size(model: nn.Module, candidates: Iterable[CachePolicy]) -> list[tuple[int, CachePolicy]]:
    """The candidates that take fewer bytes per token of this model than plain, with their bytes, smallest first.

    Raises:
        ValueError: a candidate that sets more than how tensors are stored.
    """
    plain, found = bytes_per_token(model, PLAIN), []
    for policy in candidates:
        if more := sorted({*policy.changed()} - STORAGE_FIELDS):
            raise ValueError(f"a candidate sets {', '.join(more)}: give only {', '.join(sorted(STORAGE_FIELDS))}")
        try:
            size = bytes_per_token(model, policy)
        except ValueError:  # it cannot store these head dims
            continue
        if size < plain:
            found.append((size, policy))
    return sorted(found, key=lambda pair: pair[0])


def subject_of(fingerprint: str, tokens: Sequence[int]) -> str:
    """A digest of all that a measurement depends on besides the policy: model, text, device and versions."""
    versions = [importlib.metadata.version(name) for name in ("mlx-kv", "mlx", "mlx-lm")]
    subject = [fingerprint, mx.default_device().type.name, versions, list(map(int, tokens))]
    return hashlib.blake2b(json.dumps(subject).encode(), digest_size=16).hexdigest()


def _measuring(model: nn.Module, tokens: Sequence[int], progress: Progress | None) -> Measure:
    text = CodecLoss(model, tokens, progress=progress)

    def measure(policy: CachePolicy) -> tuple[float, float]:
        added = text.added(policy)
        return added.nats, added.error

    return measure


def _try(policy: CachePolicy, size: int, measure: Measure, subject: str, remembered: MeasurementCache | None) -> Tried:
    name = in_words(policy.codecs) + (f" but the newest {policy.residual_length}" if policy.residual_length else "")
    known = None if remembered is None else remembered.numbers(subject, name)
    if known is not None and len(known) == 2:
        nats, error = known
        return Tried(policy, nats, error, size, measured=False, remembered=True)
    nats, error = measure(policy)
    stored = remembered is not None and remembered.remember(subject, name, (nats, error))
    return Tried(policy, nats, error, size, measured=True, remembered=stored)
