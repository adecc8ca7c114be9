"""Prompts that begin alike: one of them is read, and the others continue from copies of its caches.

Where caches can be trimmed to any length, a row that has read more can be copied, too, also one that decodes. Others
(rings, recurrent layers, a residual) can be copied only when exactly the shared tokens have been read: reading stops
there, and all that wait get copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mlx_kv.cache.layout import NO_LIMIT, Append, Budget
from mlx_kv.cache.segmented import SegmentedCache
from mlx_kv.cache.segments import can_evict_later
from mlx_kv.generation.admission import PendingRow
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.generation.two_pass_prefill import needs_second_pass
from mlx_kv.mlxlm.traverse import attention_caches, is_ours, leaves, trim_all

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


class Beginnings(NamedTuple):
    """How rows of an engine continue from the first tokens of others.

    Attributes:
        shared: whether they do at all.
        trimmable: whether from a copy of any row that has read more: every layer keeps all tokens, as they came.
        by_chunk: longer prompts depend on the chunks in which they were read, since tokens are evicted or quantised
            between two chunks; `NO_LIMIT` where none does.
        step: tokens of a chunk.
    """

    shared: bool
    trimmable: bool
    by_chunk: int
    step: int

    @classmethod
    def of(cls, caches: Iterable[Any], step: int) -> Beginnings:
        """Of the caches of a row."""
        everything = list(leaves(caches))
        ours = attention_caches(everything)
        shared = bool(ours) and not needs_second_pass(everything)
        trimmable = len(ours) == len(everything) and all(
            isinstance(cache.layout, Append) and cache.view.residual is None and not cache.view.quantized_start
            for cache in ours
        )
        limits = [cache.layout.most_held for cache in ours if isinstance(cache.layout, Budget)]
        limits += [cache.view.quantized_start for cache in ours if cache.view.quantized_start]
        return cls(shared, trimmable, min(limits, default=NO_LIMIT), step)

    def common(self, sequence: TokenSequence, other: TokenSequence) -> int:
        """First tokens of a prompt that another one has, too, and from which it continues as if it had read them.

        All but its last one at most.
        """
        text, others = sequence.text, other.text
        if text is None or others is None or not self.shared:
            return 0
        length = min(len(text) - 1, len(others))
        differ = text[:length] != others[:length]
        found = int(differ.argmax()) if differ.any() else length
        # Both are then read in the same chunks as alone.
        return found if max(len(text), len(others)) <= self.by_chunk else found // self.step * self.step

    def stop(self, row: PendingRow, waiting: Iterable[TokenSequence]) -> int:
        """How many tokens of a prompt may be read, until a waiting sequence can continue from a copy of its caches."""
        if self.trimmable or not self.shared:
            return NO_LIMIT
        ends = [end for heir in waiting if (end := self._gain(heir, row.sequence)) > row.total]
        return min(ends, default=NO_LIMIT) - row.total

    def heirs(self, row: PendingRow, waiting: Iterable[TokenSequence]) -> list[TokenSequence]:
        """The waiting sequences that continue from a copy of a row as it is."""
        if self.trimmable or not self.shared:
            return []
        return [heir for heir in waiting if self._gain(heir, row.sequence) == row.total]

    def _gain(self, sequence: TokenSequence, other: TokenSequence) -> int:
        """`common`, or 0 where a copy would hold few tokens more than the sequence has."""
        common = self.common(sequence, other)
        return common if common >= len(sequence.before) + MIN_SHARED else 0


def shares_up_to(caches: Iterable[Any]) -> int:
    """Slots of a row up to which it holds first tokens that others have, too, once with them; 0 is never.

    As far as it is sure: rows that share less than they could take no more memory than planned.
    """
    everything = list(leaves(caches))
    ours = attention_caches(everything)
    limits = [NO_LIMIT if len(ours) == len(everything) > 0 else 0]
    for cache in ours:
        evictor, layout = cache.evictor, cache.layout
        if cache.view.residual is not None or cache.view.quantized_start:
            limits.append(0)
        elif isinstance(layout, Budget) and evictor is not None:
            limits.append(layout.most_held if can_evict_later(evictor) and not evictor.wants_second_pass else 0)
        elif not isinstance(layout, Append):
            limits.append(0)
    return min(limits)


def prompt_text(sequence: TokenSequence, held: int) -> np.ndarray[Any, Any] | None:
    """All tokens of a prompt; None if it is private, or if tokens that its caches hold are not known.

    Args:
        held: tokens in its caches.
    """
    if sequence.private or held != len(sequence.before):
        return None
    return np.array([*sequence.before, *sequence.tokens])


def continue_from(sequence: TokenSequence, tokens: int, extracted: list[Any] | None) -> None:
    """Gives a sequence the first tokens of the caches that were extracted from another row, if they can be trimmed."""
    if extracted is not None and trim_all(extracted, tokens_of(extracted) - tokens):
        text = [*sequence.before, *sequence.tokens]
        sequence.caches = extracted
        sequence.before, sequence.tokens = text[:tokens], text[tokens:]


def share(source: Source) -> None:
    """Makes the first tokens of a row segments, which copies of the row share."""
    for cache in leaves(source.caches):
        if isinstance(cache, SegmentedCache):
            cache.share(source.row, source.tokens)


def tokens_of(caches: Iterable[Any]) -> int:
    """Tokens that the caches of a row have read."""
    return max((int(cache.offset) for cache in leaves(caches) if is_ours(cache)), default=0)
