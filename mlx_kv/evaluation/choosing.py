"""Which way to store keys and values is the smallest that a model bears: measured on a text, not believed.

Decides what is tried, in which order, on which text unless another is given, and by what a measurement is found
again. Knows nothing about how a loss is measured, nor about files.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.checks import is_number, shown, token_ids
from mlx_kv.cache.codecs import in_words
from mlx_kv.evaluation.codec_loss import PLAIN, CodecLoss, bytes_per_token
from mlx_kv.evaluation.questions import python_texts
from mlx_kv.evaluation.reading import Progress
from mlx_kv.mlxlm.loading import vocabulary_of
from mlx_kv.policy import CachePolicy

MAX_LOSS = 0.01  # nats a token: a perplexity one percent higher
TOKENS = 2048  # of a text
CHARACTERS = 16  # and more make no token of a text, on average
STORING = {"bits", "group_size", "codec", "residual_length"}  # what a candidate may say
PAIRS = ((4, 4), (5, 4), (6, 4), (8, 4), (6, 6), (8, 8))  # bits of keys and of values
CANDIDATES = tuple(
    CachePolicy(bits=pair, group_size=group, codec=codec)
    for pair, group, codec in product(PAIRS, (64, 32), (None, "rotated"))
)
Measure = Callable[[CachePolicy], tuple[float, float]]


@dataclass(frozen=True)
class Tried:
    """What a candidate costs.

    Attributes:
        nats: a token, more than plain.
        error: the standard error of that.
        bytes_per_token: of all layers, scales included.
        measured: now; what is not was remembered.
        remembered: whether it will be the next time.
    """

    policy: CachePolicy
    nats: float
    error: float
    bytes_per_token: int
    measured: bool
    remembered: bool

    @property
    def most(self) -> float:
        """Nats that it adds at the most, by one standard error; a gain is luck, and counts as nothing."""
        return max(self.nats, 0.0) + self.error


class Numbers(Protocol):
    """Stored measurements by subject and name, such as `files.measurement_cache.MeasurementCache`."""

    def numbers(self, subject: str, name: str) -> Sequence[float] | None: ...

    def remember(self, subject: str, name: str, numbers: Sequence[float]) -> bool: ...


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
    tell: Callable[[Tried], None] | None = None,
) -> CachePolicy:
    """The policy with the fewest bytes a token that a model bears; a plain one where it bears none.

    Candidates are tried from the smallest up, those that are as small as others in the order in which they are given;
    the first that a model bears is taken: `Tried.most` is within max_loss. So a text that is too short to tell what a
    candidate costs chooses plain, and so does a max_loss of 0. What cannot store its head dims, or is not smaller than
    plain, is not tried.

    Args:
        tokens: of a text such as the model is to read; some thousands say more than a hundredth of a nat.
        max_loss: nats a token that may be added.
        candidates: policies that say nothing but how tensors are stored.
        measure: the nats that a policy adds on this text, and their standard error; None measures them, by `CodecLoss`.
        remembered: where measurements are looked up, and put; None is nowhere.
        fingerprint: of the model, by which they are found again: `files.fingerprint.model_fingerprint`.
        progress: as in `losses`, of each reading.
        tell: told of each candidate that was tried; the last is the one that is taken, if any is.

    Raises:
        ValueError: a max_loss that is no loss, a candidate that says more, or what `losses` refuses of a text.
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
        if tried.most <= max_loss:
            return policy
    return PLAIN


def usual_text() -> list[str]:
    """What is read unless a text is given: English prose and code, Python's own reference and library.

    Raises:
        ValueError: this Python comes without them.
    """
    texts = python_texts()
    return ["\n\n".join(texts.prose), "\n\n".join(function.source for function in texts.functions)]


def tokens_of(tokenizer: Any, parts: Sequence[str], count: int = TOKENS) -> list[int]:
    """So many tokens of a text at the most, as many of each of its parts; special tokens only where the first begins.

    Args:
        tokenizer: as from `mlx_kv.load`.
    """
    share = count // len(parts)
    beginnings = enumerate(part[: CHARACTERS * share] for part in parts)
    each = [tokenizer.encode(text, add_special_tokens=not number)[:share] for number, text in beginnings]
    return [int(token) for part in each for token in part]


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

    def measure(policy: CachePolicy) -> tuple[float, float]:
        added = text.added(policy)
        return added.nats, added.error

    return measure


def _try(policy: CachePolicy, size: int, measure: Measure, subject: str, remembered: Numbers | None) -> Tried:
    name = in_words(policy.codecs) + (f" but the newest {policy.residual_length}" if policy.residual_length else "")
    known = None if remembered is None else remembered.numbers(subject, name)
    if known is not None and len(known) == 2:
        nats, error = known
        return Tried(policy, nats, error, size, measured=False, remembered=True)
    nats, error = measure(policy)
    kept = remembered is not None and remembered.remember(subject, name, (nats, error))
    return Tried(policy, nats, error, size, measured=True, remembered=kept)
