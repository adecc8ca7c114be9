"""Prompts on their way into a batch: they are read together, a chunk of each in a pass, while other rows decode.

Of prompts that begin alike, one is read, and the others continue from copies of its caches. Where caches can be trimmed
to any length, a row that has read more can be copied, too, also one that decodes. Others (rings, recurrent layers, a
residual) can be copied only when exactly the shared tokens have been read: reading stops there, and all that wait get
copies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_kv.cache.layout import NO_LIMIT, Append, Budget
from mlx_kv.cache.segmented import SegmentedCache
from mlx_kv.cache.segments import can_evict_later
from mlx_kv.generation.decode_batch import DecodeBatch
from mlx_kv.generation.prefill import needs_second_pass, read_chunk
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.generation.speculation.drafters import Drafter
from mlx_kv.mlxlm.batching import evaluate_caches
from mlx_kv.mlxlm.taps import states_before
from mlx_kv.mlxlm.traverse import attention_caches, is_ours, leaves, trim_all
from mlx_kv.mlxlm.vision import text_tokens

MIN_SHARED = 64  # tokens; shorter beginnings are read again
MIN_CHUNK = 64  # with fewer tokens, weights are read too often for what is gained
MAX_CHECKPOINTS = 32  # of one prompt, so that at most a 32nd of it is read again
FIRST_CHUNK = 128  # before the speed of the device is measured
MAX_PROMPTS_AT_ONCE = 8  # read together; mlx-lm's number
FASTER, MAX_PASS_SECONDS = 1.1, 1.0  # of passes of more tokens: no row is served and no Ctrl-C heard meanwhile


@dataclass
class PendingRow:
    """A row to come.

    Attributes:
        caches: of `Decoder.make_caches`; they may hold what comes before the prompt.
        read: tokens of the prompt that were read. The last one is left for the first decoding pass.
        kept: of all its tokens, those that were in its caches when it came, or when they were last kept.
    """

    sequence: TokenSequence
    caches: list[Any]
    read: int = 0
    kept: int = 0

    @property
    def total(self) -> int:
        """Tokens that its caches hold, those before the prompt included."""
        return len(self.sequence.before) + self.read

    @property
    def left(self) -> int:
        """Tokens to be read before the row can decode."""
        return len(self.sequence.tokens) - 1 - self.read


class Admission:
    """Rows whose prompts are being read.

    Args:
        target: the model, which reads tokens (B, n) into caches; the other caches of a row are the drafter's.
        drafter: reads the same prompts; None if there is none.
        batched: whether a row alone becomes a batch of one; else its caches are used as they are.
        by_class: prepares the model's caches of a row for a batch.
    """

    def __init__(
        self,
        target: DecodeBatch,
        drafter: Drafter | None,
        batched: bool,
        by_class: Callable[[list[Any]], list[Any]],
    ) -> None:
        self._target, self._layers, self._drafter = target, target.layers, drafter
        self._batched, self._by_class = batched, by_class
        self.rows: list[PendingRow] = []
        self.caches: list[Any] = []  # the model's, of all these rows
        self._drafter_caches: list[Any] = []

    def add(self, rows: Sequence[PendingRow]) -> None:
        """Adds rows after those that are being read."""
        if not rows:
            return
        caches = self._merged([self._by_class(row.caches[: self._layers]) for row in rows])
        drafters = self._merged([row.caches[self._layers :] for row in rows])
        for batch, other in zip((*self.caches, *self._drafter_caches), (*caches, *drafters), strict=False):
            batch.extend(other)
        self.caches, self._drafter_caches = self.caches or caches, self._drafter_caches or drafters
        for row in rows:
            row.caches, row.sequence.caches = [], None  # the batch has them now
        self.rows += rows

    def _merged(self, rows: Sequence[list[Any]]) -> list[Any]:
        """The caches of single rows as those of one batch."""
        if len(rows) == 1 and not self._batched:
            return rows[0]
        return [caches[0].merge(list(caches)) for caches in zip(*rows, strict=True)]

    def read(self, limits: Sequence[int], pad: bool = False, wait: bool = True) -> int:
        """Reads a chunk of each prompt, up to its limit; returns the number of tokens.

        Args:
            pad, wait: as of `read_chunk`; a drafter is waited for.
        """
        pieces = [
            row.sequence.tokens[row.read : row.read + min(count, row.left)]
            for row, count in zip(self.rows, limits, strict=True)
        ]
        if not any(pieces):
            return 0
        read_chunk(self._target.forward, self.caches, pieces, pad, wait)
        states = self._states_before(pieces)
        if self._drafter is not None and self._drafter_caches:
            texts = [text_tokens(self._target.model, piece) for piece in pieces]
            self._drafter.read(texts, self._drafter_caches, *states)
        for row, piece in zip(self.rows, pieces, strict=True):
            row.read += len(piece)
        return sum(map(len, pieces))

    def _states_before(self, pieces: Sequence[Sequence[int]]) -> list[mx.array]:
        """The state before each token of the pieces that were just read, (B, n, width), if the drafter reads it."""
        states = self._target.states
        if states is None:
            return []
        mx.eval(states)  # in all processes of the model: a pass that wrote to caches has not computed them
        none = mx.zeros(states.shape[2:], states.dtype)
        rows = [row.sequence for row in self.rows]
        first = mx.stack([none if row.state is None else row.state for row in rows])[:, None]
        ends = mx.array([max(1, len(piece)) - 1 for piece in pieces])
        last = mx.take_along_axis(states, ends[:, None, None], axis=1)[:, 0]  # a copy: the chunk is not kept for it
        mx.eval(first, last)
        for number, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
            if piece:
                row.state = last[number]
        self._target.states = None
        return [states_before(states, first)]

    def keep_prefixes(self, wait: bool) -> None:
        """Gives copies of what was read to the sequences that keep it: after some chunks, and at the end."""
        for index, row in enumerate(self.rows):
            is_far = (row.total - row.kept) * MAX_CHECKPOINTS > row.total + row.left
            if row.sequence.keep is not None and row.total > row.kept and (row.left <= 0 or is_far):
                row.kept = row.total
                tokens = [*row.sequence.before, *row.sequence.tokens[: row.read]]
                row.sequence.keep(tokens, evaluate_caches(self.extract(index), wait))

    def take_finished(self) -> tuple[list[TokenSequence], list[Any], list[Any]]:
        """Removes the rows that can decode, with the model's caches and the drafter's, as a batch."""
        done = [index for index, row in enumerate(self.rows) if row.left <= 0]
        sequences = [self.rows[index].sequence for index in done]
        caches, drafters = self.caches, self._drafter_caches
        if not done:
            return [], [], []
        if len(done) < len(self.rows):
            caches, drafters = copy.deepcopy((caches, drafters))  # at once: layers of a sequence stay together
            for cache in (*caches, *drafters):
                cache.filter(done)
        self.keep([index for index in range(len(self.rows)) if index not in done])
        return sequences, caches, drafters

    def extract(self, row: int) -> list[Any]:
        """Copies of a row's caches, the model's and the drafter's."""
        return [cache.extract(row) for cache in (*self.caches, *self._drafter_caches)]

    def keep(self, rows: Sequence[int]) -> None:
        """Removes all other rows."""
        if not rows:
            self.caches, self._drafter_caches = [], []
        elif len(rows) < len(self.rows):
            for cache in (*self.caches, *self._drafter_caches):
                cache.filter(list(rows))
        self.rows = [self.rows[row] for row in rows]


class PrefillPace:
    """Chunk sizes that limit how long decoding rows wait, by how long the chunks before took.

    Only for caches that do not depend on the chunks: a budget evicts after each, and a `quantized_start` takes effect
    after one.

    Args:
        max_seconds: of a pass while rows decode.
        max_tokens: of one prompt in a pass.

    Attributes:
        engines: that take turns, and share that time.
    """

    engines = 1

    def __init__(self, max_seconds: float, max_tokens: int) -> None:
        self._max_seconds, self._max_tokens = max_seconds, max_tokens
        self._per_token: float | None = None  # seconds, in the last pass
        self.passes = 0  # that were recorded

    def chunk(self, prompts: int) -> int:
        """Tokens of each of `prompts` prompts to read in a pass beside decoding rows."""
        if self._per_token is None:
            fits = FIRST_CHUNK
        else:
            fits = int(min(self._max_seconds / self.engines / self._per_token, 1e9)) // max(1, prompts)
        step = max(MIN_CHUNK, 1 << max(0, fits.bit_length() - 2))  # two steps to twice the size: few shapes
        return min(self._max_tokens, max(MIN_CHUNK, fits // step * step))

    def record(self, tokens: int, seconds: float) -> None:
        """Records the time of a pass over so many prompt tokens; short passes are ignored."""
        if tokens >= MIN_CHUNK and seconds > 0:
            self._per_token = seconds / tokens
            self.passes += 1


class PassSize:
    """Tokens of prompts that are read in one pass, as the passes before show: twice as many where that reads faster.

    A GPU reads 16 prompts of 2,000 tokens in a third of the time if eight are read together. A CPU is as busy with two
    chunks, and more would keep the first prompt waiting for the last.

    Args:
        chunk: tokens of one prompt in a pass.
        fixed: two chunks in any case: all processes of a model must agree.

    Attributes:
        tokens: at most, of all prompts together.
    """

    def __init__(self, chunk: int, fixed: bool = False) -> None:
        self._chunk, self._limit = chunk, (2 if fixed else MAX_PROMPTS_AT_ONCE) * chunk
        self.tokens = (2 if fixed else 1) * chunk  # the second pass may have two, to compare
        self._rates: dict[int, float] = {}  # tokens per second, the most so far, by log2 of the tokens

    def record(self, tokens: int, seconds: float) -> None:
        """Records the time of a pass over so many prompt tokens."""
        size, largest = (tokens - 1).bit_length(), (self.tokens - 1).bit_length()
        rate = self._rates[size] = max(tokens / seconds, self._rates.get(size, 0.0))
        smaller = self._rates.get(size - 1)
        first = self.tokens == self._chunk  # there is nothing smaller to compare with
        faster = size == largest and smaller is not None and rate >= FASTER * smaller
        most = self._limit if first else min(self._limit, MAX_PASS_SECONDS * rate)
        if (first or faster) and 2 * self.tokens <= most:
            self.tokens *= 2


# --- prompts that begin alike -----------------------------------------------------------------------------------------


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
        limits = [cache.layout.compaction_limit for cache in ours if isinstance(cache.layout, Budget)]
        limits += [cache.view.quantized_start for cache in ours if cache.view.quantized_start]
        return cls(shared, trimmable, min(limits, default=NO_LIMIT), step)

    def common(self, sequence: TokenSequence, other: TokenSequence) -> int:
        """First tokens of a prompt that another one has, too, and from which it continues as if it had read them.

        All but its last one at most.
        """
        text, others = sequence.text, other.text
        if text is None or others is None or not self.shared:
            return 0
        limit = min(len(text) - 1, len(others))
        differ = text[:limit] != others[:limit]
        length = int(differ.argmax()) if differ.any() else limit
        # Both are then read in the same chunks as alone.
        return length if max(len(text), len(others)) <= self.by_chunk else length // self.step * self.step

    def stop(self, row: PendingRow, waiting: Iterable[TokenSequence]) -> int:
        """How many tokens of a prompt may be read, until a waiting sequence can continue from a copy of its caches."""
        if self.trimmable or not self.shared:
            return NO_LIMIT
        ends = [end for sequence in waiting if (end := self._shared_with(sequence, row.sequence)) > row.total]
        return min(ends, default=NO_LIMIT) - row.total

    def continuing(self, row: PendingRow, waiting: Iterable[TokenSequence]) -> list[TokenSequence]:
        """The waiting sequences that continue from a copy of a row as it is."""
        if self.trimmable or not self.shared:
            return []
        return [sequence for sequence in waiting if self._shared_with(sequence, row.sequence) == row.total]

    def _shared_with(self, sequence: TokenSequence, other: TokenSequence) -> int:
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
            limits.append(layout.compaction_limit if can_evict_later(evictor) and not evictor.wants_second_pass else 0)
        elif not isinstance(layout, Append):
            limits.append(0)
    return min(limits)


def prompt_text(sequence: TokenSequence, cached_tokens: int) -> np.ndarray[Any, Any] | None:
    """All tokens of a prompt; None if it is private, or if tokens that its caches hold are not known.

    Args:
        cached_tokens: tokens in its caches.
    """
    if sequence.private or cached_tokens != len(sequence.before):
        return None
    return np.array([*sequence.before, *sequence.tokens])


def continue_from(sequence: TokenSequence, tokens: int, extracted: list[Any] | None) -> None:
    """Gives a sequence the first tokens of the caches that were extracted from another row, if they can be trimmed."""
    if extracted is not None and trim_all(extracted, tokens_of(extracted) - tokens):
        text = [*sequence.before, *sequence.tokens]
        sequence.caches = extracted
        sequence.before, sequence.tokens, sequence.state = text[:tokens], text[tokens:], None


def share(source: Source) -> None:
    """Makes the first tokens of a row segments, which copies of the row share."""
    for cache in leaves(source.caches):
        if isinstance(cache, SegmentedCache):
            cache.share(source.row, source.tokens)


def tokens_of(caches: Iterable[Any]) -> int:
    """Tokens that the caches of a row have read."""
    return max((int(cache.offset) for cache in leaves(caches) if is_ours(cache)), default=0)
