"""Prompts on their way into a batch: they are read together, a chunk of each in a pass, while other rows decode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_kv.generation.prefill import read_chunk
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.generation.speculation.drafters import Drafter

MIN_CHUNK = 64  # with fewer tokens, weights are read too often for what is gained
FIRST_CHUNK = 128  # before the speed of the device is measured


@dataclass
class PendingRow:
    """A row to come.

    Attributes:
        caches: of `Decoder.make_caches`; they may hold what comes before the prompt.
        read: tokens of the prompt that were read. The last one is left for the first decoding pass.
    """

    sequence: TokenSequence
    caches: list[Any]
    read: int = 0

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
        model: reads tokens (B, n) into caches.
        layers: number of the model's caches of a row; the others are the drafter's.
        drafter: reads the same prompts; None if there is none.
        batched: whether a row alone becomes a batch of one; else its caches are used as they are.
        by_class: prepares the model's caches of a row for a batch.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        layers: int,
        drafter: Drafter | None,
        batched: bool,
        by_class: Callable[[list[Any]], list[Any]],
    ) -> None:
        self._model, self._layers, self._drafter = model, layers, drafter
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
        for own, other in zip((*self.caches, *self._drafter_caches), (*caches, *drafters), strict=False):
            own.extend(other)
        self.caches, self._drafter_caches = self.caches or caches, self._drafter_caches or drafters
        for row in rows:
            row.caches, row.sequence.caches = [], None  # the batch has them now
        self.rows += rows

    def _merged(self, rows: Sequence[list[Any]]) -> list[Any]:
        """The caches of single rows as those of one batch."""
        if len(rows) == 1 and not self._batched:
            return rows[0]
        return [caches[0].merge(list(caches)) for caches in zip(*rows, strict=True)]

    def read(self, most: Sequence[int]) -> int:
        """Reads a chunk of each prompt, of so many tokens at most; returns the number of tokens."""
        pieces = [
            row.sequence.tokens[row.read : row.read + min(count, row.left)]
            for row, count in zip(self.rows, most, strict=True)
        ]
        if not any(pieces):
            return 0
        read_chunk(self._model, self.caches, pieces)
        if self._drafter is not None and self._drafter_caches:
            self._drafter.read(pieces, self._drafter_caches)
        for row, piece in zip(self.rows, pieces, strict=True):
            row.read += len(piece)
        return sum(map(len, pieces))

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
    """

    def __init__(self, max_seconds: float, max_tokens: int) -> None:
        self._max_seconds, self._max_tokens = max_seconds, max_tokens
        self._per_token: float | None = None  # seconds, in the last pass

    def chunk(self, prompts: int) -> int:
        """Tokens of each of `prompts` prompts to read in a pass beside decoding rows."""
        if self._per_token is None:
            fits = FIRST_CHUNK
        else:
            fits = int(min(self._max_seconds / self._per_token, 1e9)) // max(1, prompts)
        return min(self._max_tokens, max(MIN_CHUNK, fits // MIN_CHUNK * MIN_CHUNK))

    def took(self, tokens: int, seconds: float) -> None:
        """Records the time of a pass over so many prompt tokens; short passes are ignored."""
        if tokens >= MIN_CHUNK and seconds > 0:
            self._per_token = seconds / tokens
