"""Sequences that are continued, and what is told of each of their tokens.

Decides what could not be continued, and what text comes with a token. Knows nothing about models, batches, or what a
cache is. Arrays appear only inside caches that are passed on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_kv.cache.checks import whole_number
from mlx_kv.generation.logprobs import TokenScore
from mlx_kv.generation.sampling import Sampler
from mlx_kv.generation.settings import LogitsProcessor
from mlx_kv.mlxlm.batching import check_alike


@dataclass(frozen=True)
class BatchToken:
    """One token of one sequence.

    Attributes:
        index: which prompt it continues.
        text: what can be said now: tokens that end within a character or a word wait for the next. Empty without a
            tokenizer, and for the token that ends a sequence.
        token: its id.
        finish_reason: "stop" or "length" with the last token of a sequence, else None.
        from_draft: whether it had been drafted.
        caches: with the last token, if the engine was asked for them: the caches of the row, as `Engine.extract` gives
            them.
        score: its log-probability and those of the likeliest tokens, where its sequence wants them.
    """

    index: int
    text: str
    token: int
    finish_reason: str | None
    from_draft: bool = False
    caches: list[Any] | None = None
    score: TokenScore | None = None


@dataclass
class TokenSequence:
    """One sequence to be continued.

    Attributes:
        index: by which its tokens are known; no two at once have the same.
        tokens: of the prompt, at least one; without those that `caches` have read.
        max_tokens: to generate, from 1 up.
        detokenizer: None for tokens without text.
        sampler: None is greedy. One that counts positions, as a `SeededSampler` does, is for this sequence alone.
        caches: of `Engine.make_caches`, which may have read what comes before `tokens`; None are new ones.
        before: what they have read, for processors and drafters that look at the text; it may be left out.
        processors: what is made of its logits before anything is drawn. They are shown all its tokens: `before`, those
            of the prompt, and what was generated.
        top_logprobs: how many likeliest tokens are told with each token; None tells no log-probabilities at all.
        private: whether drafters are to keep its text from other rows.
        drafted, accepted: tokens that the engine drafted for it in the last pass, and those that were right so far.
    """

    index: int
    tokens: list[int]
    max_tokens: int
    detokenizer: Any = None
    sampler: Sampler | None = None
    caches: list[Any] | None = None
    before: Sequence[int] = ()
    processors: tuple[LogitsProcessor, ...] = ()
    top_logprobs: int | None = None
    private: bool = False
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0

    def emit(
        self,
        token: int,
        finish: str | None,
        from_draft: bool = False,
        caches: list[Any] | None = None,
        score: TokenScore | None = None,
    ) -> BatchToken:
        self.emitted += 1
        self.accepted += from_draft
        text = ""
        if self.detokenizer is not None:
            if finish != "stop":
                self.detokenizer.add_token(token)
            if finish is not None:
                self.detokenizer.finalize()
            text = self.detokenizer.last_segment
        return BatchToken(self.index, text, token, finish, from_draft, caches, score)


def check(sequence: TokenSequence) -> None:
    """Raises ValueError for what could not be continued, before it joins others."""
    if not sequence.tokens:
        raise ValueError(f"sequence {sequence.index} is empty: give at least one token")
    whole_number(f"max_tokens of sequence {sequence.index}", sequence.max_tokens, least=1)


def common_prefix(some: list[int], others: list[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    most = min(len(some), len(others))
    if some[:most] == others[:most]:
        return most
    return next(place for place in range(most) if some[place] != others[place])


class Waiting:
    """Sequences that have no row yet: first come, first served.

    Args:
        caches: gives the caches that those which a sequence brings must be like.
    """

    def __init__(self, caches: Callable[[], list[Any]]) -> None:
        self._caches = caches
        self._queue: deque[TokenSequence] = deque()

    def submit(self, sequence: TokenSequence, first: Any) -> None:
        """Raises ValueError for what could not be continued, before it joins others.

        Args:
            first: where it goes before it waits here, if it is wanted there.
        """
        check(sequence)
        if sequence.caches is not None:
            check_alike(self._caches(), sequence.caches)
        if first.accepts(sequence):
            first.add(sequence)
        else:
            self._queue.append(sequence)

    def take(self, sequence: TokenSequence | None) -> None:
        """Where there is one that has been elsewhere, it waits here now."""
        if sequence is not None:
            self._queue.append(sequence)

    def cancel(self, index: int) -> None:
        """One that is not there is no error."""
        self._queue = deque(sequence for sequence in self._queue if sequence.index != index)

    def next(self) -> TokenSequence:
        """The first of them has a row now."""
        return self._queue.popleft()

    def clear(self) -> None:
        self._queue.clear()

    @property
    def first(self) -> TokenSequence:
        return self._queue[0]

    def __iter__(self) -> Iterator[TokenSequence]:
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)
