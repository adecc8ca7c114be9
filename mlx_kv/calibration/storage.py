"""What it costs to store keys and values in fewer bits, measured on a text, and the mean keys of a model.

B rows, S tokens, n tokens of a text, V the vocabulary.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.cache.checks import token_ids
from mlx_kv.cache.codecs import Affine, Centre, CentredByLayer, Codec, in_words
from mlx_kv.calibration.questions import python_texts
from mlx_kv.files.measurement_cache import MeasurementCache
from mlx_kv.generation.prefill import prefill_step, read_chunk
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.loading import context_length, vocabulary_of
from mlx_kv.mlxlm.traverse import attention_caches, is_ours, leaves
from mlx_kv.policy import CachePolicy
from mlx_kv.settings import is_number, shown

Progress = Callable[[int, int], None]  # called with the tokens read, and all that will be


def check_length(model: nn.Module, needed: int) -> None:
    """Raises ValueError where so many tokens are more than a model was made for."""
    length = context_length(model)
    if length is not None and needed > length:
        raise ValueError(f"{needed:,} tokens are read, but this model was made for {length:,}: give a shorter context")


def read(
    model: Callable[..., Any],
    caches: Sequence[Any],
    tokens: mx.array,
    step: int,
    progress: Progress | None = None,
) -> None:
    """Puts tokens (B, S) into caches in chunks, the last one included.

    Args:
        model: or any function that reads tokens (B, n) into caches.
        step: tokens of a chunk.
        progress: called after each chunk.
    """
    total = tokens.shape[1]
    for first in range(0, total, step):
        last = min(first + step, total)
        read_chunk(model, caches, tokens[:, first:last])
        if progress is not None:
            progress(last, total)


def read_losses(
    model: nn.Module, caches: Sequence[Any], text: mx.array, step: int, progress: Progress | None = None
) -> np.ndarray:
    """-log p of each token of texts (B, S + 1) after the first, in nats: (B, S) float32. Logits of one chunk are held.

    Args:
        caches: what the first S tokens are read into.
        step, progress: as for `read`.
    """
    found: list[np.ndarray] = []

    def predict(tokens: mx.array, cache: Any) -> None:
        done = sum(chunk.shape[1] for chunk in found)
        targets = text[:, done + 1 : done + 1 + tokens.shape[1]]
        found.append(np.array(-log_likelihoods(model(tokens, cache=cache), targets)))

    read(predict, caches, text[:, :-1], step, progress)
    return np.concatenate(found, axis=1)


def log_likelihoods(logits: mx.array, targets: mx.array) -> mx.array:
    """log p of targets (B, S) under logits (B, S, V), float32 (B, S)."""
    logits = logits.astype(mx.float32)
    picked = mx.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return picked - mx.logsumexp(logits, axis=-1)


PLAIN = CachePolicy()
MIN_LOSS_TOKENS = 3  # a first one and two losses: the spread of one alone is unknown


def losses(
    model: nn.Module,
    tokens: Sequence[int],
    policy: CachePolicy = PLAIN,
    step: int | None = None,
    progress: Progress | None = None,
) -> np.ndarray:
    """-log p of every token of a text after the first, in nats: (n - 1,) float32.

    Logits of one chunk are in memory at a time. Each query sees keys and values as they are stored, its own included.

    Args:
        model: as from `mlx_kv.load`.
        tokens: n of them.
        policy: of the caches that the text is read into.
        step: tokens of a chunk; None is the prefill step of generation.
        progress: called after each chunk with the tokens read, and all that will be read.

    Raises:
        ValueError: a text that is too short to measure, or too long for the model; what `make_prompt_cache` refuses;
            token ids outside the vocabulary.
    """
    tokens = token_ids(tokens, vocabulary_of(model), "the text")
    if len(tokens) < MIN_LOSS_TOKENS:
        raise ValueError(
            f"a text of {len(tokens)} tokens is too short to measure a loss: give {MIN_LOSS_TOKENS} or more"
        )
    check_length(model, len(tokens) - 1)
    caches = make_prompt_cache(model, policy)
    found: np.ndarray = read_losses(model, caches, mx.array([tokens]), prefill_step(model, caches, step), progress)[0]
    return found


def bytes_per_token(model: nn.Module, policy: CachePolicy) -> int:
    """Bytes of the keys and values of one token in all layers, scales included, in the model's dtype.

    One token is read and nothing is evaluated. The ring of a residual, of a fixed size, is left out.

    Raises:
        ValueError: the policy cannot store these head dims.
    """
    caches = make_prompt_cache(model, policy)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    return sum(cache.nbytes_live - cache.nbytes_residual for cache in attention_caches(caches))


@dataclass(frozen=True)
class AddedLoss:
    """The loss and memory of a policy, compared with plain caches.

    Attributes:
        nats: added loss per token, the mean over the text.
        error: its standard error, as if tokens were independent.
        bytes_per_token: of all layers, scales included.
    """

    policy: CachePolicy
    nats: float
    error: float
    bytes_per_token: int

    @property
    def ratio(self) -> float:
        """The ratio of perplexities, exp(nats)."""
        return math.exp(self.nats)


class CodecLoss:
    """The losses of policies on one text; the text is read through plain caches once, for all comparisons.

    Args:
        model, tokens, step, progress: as for `losses`; progress starts anew for each policy.
    """

    def __init__(
        self, model: nn.Module, tokens: Sequence[int], step: int | None = None, progress: Progress | None = None
    ) -> None:
        self._model, self._tokens, self._step, self._progress = model, tokens, step, progress

    @cached_property
    def plain(self) -> np.ndarray:
        """Losses with plain caches, (n - 1,)."""
        return losses(self._model, self._tokens, PLAIN, self._step, self._progress)

    def added(self, policy: CachePolicy) -> AddedLoss:
        """Measures a policy on this text.

        Raises:
            ValueError: as `losses`.
        """
        size = bytes_per_token(self._model, policy)  # first: it raises for what cannot be stored
        more = losses(self._model, self._tokens, policy, self._step, self._progress) - self.plain
        return AddedLoss(policy, *mean_and_error(more), size)


def mean_and_error(numbers: np.ndarray) -> tuple[float, float]:
    """The mean of numbers (n,), and its standard error."""
    deviation = numbers.std(ddof=1, dtype=np.float64)
    return float(numbers.mean(dtype=np.float64)), float(deviation / math.sqrt(len(numbers)))


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
        fingerprint: of the model, the key of stored measurements: `files.serialization.model_fingerprint`.
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


MIN_TOKENS = 64  # the mean of fewer depends on the text


def centred(
    model: nn.Module,
    tokens: Sequence[int],
    codec: Codec | None = None,
    progress: Progress | None = None,
) -> CentredByLayer:
    """A codec for the keys of a model that subtracts their mean over a text before quantisation.

    Args:
        model: as from `mlx_kv.load`.
        tokens: of a text like those that the model reads; 1,000 are enough.
        codec: of the differences; None is 4 bits in groups of 64, rotated.
        progress: called after each chunk with the tokens read, and all that will be read.

    Raises:
        ValueError: a text that is too short, or too long for the model; token ids outside the vocabulary.

    Example:
        >>> CachePolicy(codec=(centred(model, tokens), Affine(4, 64, rotate=True)))  # doctest: +SKIP
    """
    tokens = token_ids(tokens, vocabulary_of(model), "the text")
    if len(tokens) < MIN_TOKENS:
        raise ValueError(f"a text of {len(tokens)} tokens is too short to measure keys: give {MIN_TOKENS} or more")
    check_length(model, len(tokens))
    caches = make_prompt_cache(model, PLAIN)
    read(model, caches, mx.array([tokens]), prefill_step(model, caches, None), progress)
    return CentredByLayer(tuple(map(_centre, leaves(caches))), codec or Affine(4, 64, rotate=True))


def _centre(cache: Any) -> Centre | None:
    """The centre of the keys in a cache; None where it has none."""
    if not is_ours(cache) or cache.keys is None:
        return None
    keys, _ = cache.keys_and_values()
    assert isinstance(keys, mx.array), "plain keys are not packed"
    return Centre.of(keys)
