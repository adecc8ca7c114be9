"""Rows on their way: prompts that the model and the drafter read, a chunk at a time.

Decides which tokens of a prompt are left for the first round. Knows nothing about rounds, nor about the rows that
decode meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_kv.generation.prefill import chunk_end, read_chunk
from mlx_kv.generation.sampling import Sampler
from mlx_kv.generation.settings import LogitsProcessor
from mlx_kv.generation.speculation.drafters.protocol import Drafter


@dataclass
class NewRow:
    """A row to come.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: room is made for so many more.
        sampler: None is greedy. The draft guesses with the random keys of a `SeededSampler`, which a
            `TemperatureSampler` becomes; of any other sampler, the likeliest token.
        caches: of `Decoder.make_caches`, which have read what comes before the prompt; None are new ones. They are the
            row's from now on.
        before: what they have read, as far as it is known: for processors and drafters that look at the text.
        processors: what is made of its logits before anything is drawn.
        private: whether the drafter is to keep its text from other rows.
    """

    prompt: list[int]
    max_tokens: int
    sampler: Sampler | None = None
    caches: list[Any] | None = None
    before: Sequence[int] = ()
    processors: Sequence[LogitsProcessor] = ()
    private: bool = False


@dataclass
class Joining:
    """Rows whose prompts are being read.

    Attributes:
        caches, drafter_caches: of all of these rows.
        step: tokens of each prompt read at once.
        read: of the longest prompt.
    """

    rows: list[NewRow]
    model: Callable[..., Any]
    drafter: Drafter
    caches: list[Any]
    drafter_caches: list[Any]
    step: int
    read: int = field(default=0, init=False)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt. The last of each is left to be read, for the logits that come next."""
        return max(len(row.prompt) for row in self.rows)

    def keep(self, rows: Sequence[int]) -> None:
        """Lets all other rows go; at least one stays."""
        for cache in (*self.caches, *self.drafter_caches):
            cache.filter(list(rows))
        self.rows = [self.rows[row] for row in rows]

    def read_on(self) -> bool:
        """Reads a chunk; True when all is read."""
        first = self.read
        self.read = chunk_end(first, self.longest, self.step)
        if self.read > first:
            pieces = [row.prompt[:-1][first : self.read] for row in self.rows]
            read_chunk(self.model, self.caches, pieces)
            if self.drafter_caches:
                self.drafter.read(pieces, self.drafter_caches)
        return self.read >= self.longest - 1
