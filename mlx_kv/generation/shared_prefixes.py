"""Prompts that begin alike: one of them is read, and the others continue from copies that share its segments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mlx_kv.cache.layout import Append
from mlx_kv.cache.segments import SegmentedCache
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.mlxlm.traverse import is_ours, leaves, trim_all

MIN_SHARED = 64  # tokens; shorter beginnings are read again


class Source(NamedTuple):
    """A row from which a sequence can continue.

    Attributes:
        caches: of the batch.
        row: in this batch.
        tokens: first tokens of the sequence that the row has read; all but the last of its prompt at most.
    """

    caches: Sequence[Any]
    row: int
    tokens: int


def can_share(caches: Sequence[Any]) -> bool:
    """Whether a row can continue from any beginning of another: all layers keep all tokens, stored from the start."""
    everything = list(leaves(caches))
    return bool(everything) and all(
        is_ours(cache)
        and isinstance(cache.layout, Append)
        and cache.view.residual is None
        and not cache.view.quantized_start
        for cache in everything
    )


def prompt_text(sequence: TokenSequence, held: int) -> np.ndarray[Any, Any] | None:
    """All tokens of a prompt; None if it is private, or if tokens that its caches hold are not known.

    Args:
        held: tokens in its caches.
    """
    if sequence.private or held != len(sequence.before):
        return None
    return np.array([*sequence.before, *sequence.tokens])


def common_tokens(sequence: TokenSequence, other: TokenSequence) -> int:
    """First tokens of a prompt that another one has, too: all but its last one at most."""
    text, others = sequence.text, other.text
    if text is None or others is None:
        return 0
    length = min(len(text) - 1, len(others))
    differ = text[:length] != others[:length]
    return int(differ.argmax()) if differ.any() else length


def continue_from(sequence: TokenSequence, source: Source, extracted: list[Any] | None) -> None:
    """Gives a sequence the first tokens of the caches that were extracted from its source, if they can be trimmed."""
    if extracted is not None and trim_all(extracted, tokens_of(extracted) - source.tokens):
        text = [*sequence.before, *sequence.tokens]
        sequence.caches = extracted
        sequence.before, sequence.tokens = text[: source.tokens], text[source.tokens :]


def share(source: Source) -> None:
    """Makes the first tokens of a row segments, which copies of the row share."""
    for cache in leaves(source.caches):
        if isinstance(cache, SegmentedCache):
            cache.share(source.row, source.tokens)


def tokens_of(caches: Iterable[Any]) -> int:
    """Tokens that the caches of a row have read."""
    return max((int(cache.offset) for cache in leaves(caches) if is_ours(cache)), default=0)
