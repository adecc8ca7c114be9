"""Sequences to be continued, their progress, and the tokens that they get."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_kv.generation.sampling import Sampler
from mlx_kv.generation.settings import LogitsProcessor

FIRST_EXPECTED = 256  # tokens of an answer, before any has ended
ANSWERS_SEEN, LIKELY = 64, 0.9  # answers of a class that are remembered; the share of them that gets enough room
ROOM_AHEAD = 32  # tokens before the end of an answer's room at which it gets more, for one layer after the other
UNLIMITED = 2**31 - 1  # max_tokens of a sequence that only its caller ends


@dataclass(frozen=True)
class Emitted:
    """One token of a row.

    Attributes:
        logprobs: the model's log-probabilities (V,) at its place.
        from_draft: whether it was drafted.
    """

    token: int
    logprobs: mx.array
    from_draft: bool = False


@dataclass(frozen=True)
class BatchToken:
    """One token of one sequence.

    Attributes:
        index: index of its prompt.
        text: text that is complete with this token: a token that ends within a character or a word adds its text to
            the next one. Empty without a tokenizer, and for the token that ends a sequence.
        token: its id.
        finish_reason: "stop" or "length" with the last token of a sequence, else None.
        from_draft: whether it was drafted.
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


@dataclass(frozen=True)
class SequenceProgress:
    """How far a sequence is.

    Attributes:
        left: prompt tokens still to be read.
        drafted: tokens drafted for it in the last pass.
        accepted: drafted tokens that were right, so far.
    """

    left: int = 0
    drafted: int = 0
    accepted: int = 0


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
        top_logprobs: number of likeliest tokens reported with each token; None reports no log-probabilities.
        private: whether drafters are to keep its text from other rows.
        on_start: called when its prompt begins to be read; `before` are then the tokens that need not be.
        keep: called while its prompt is read, after some chunks and at the end, with the tokens that were read and
            copies of the caches.
        drafted, accepted: tokens that the engine drafted for it in the last pass, and those that were right so far.
        images: that its prompt has: the model can read it as long as they are held.
        resumed: how many of `tokens`, the last ones, count as its answer: it goes on where another sequence ended.
        room: tokens of its answer, resumed ones included, for which slots are allocated; more come as it grows. 0 is
            what its engine expects.
        text: all tokens of the prompt, for rows that begin alike; None if it is not to be shared.
        state: the hidden state (width,) of the last token that was read of it; None if no drafter reads such states, or
            it is not known.
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
    on_start: Callable[[TokenSequence], None] | None = None
    keep: Callable[[list[int], list[Any]], object] | None = None
    drafted: int = 0
    accepted: int = 0
    images: tuple[Any, ...] = ()
    resumed: int = 0
    emitted: int = field(default=0, init=False)
    room: int = 0
    text: np.ndarray[Any, Any] | None = field(default=None, init=False, repr=False, compare=False)
    state: mx.array | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.emitted = self.resumed

    @property
    def prompt_tokens(self) -> int:
        """Tokens before its answer."""
        return len(self.before) + len(self.tokens) - self.resumed

    def start(self) -> None:
        """Its prompt begins to be read."""
        on_start, self.on_start = self.on_start, None
        if on_start is not None:
            on_start(self)

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


class AnswerLengths:
    """Lengths of the answers so far, which say how long the next ones are likely to be.

    Clients ask for as many tokens as they could ever use, and nearly all answers end far earlier: slots for max_tokens
    would be memory that nobody writes to. Answers are classed by the power of two below their max_tokens, since those
    who set it low often use all of it.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[int]] = {}

    def count(self, max_tokens: int, tokens: int) -> None:
        """Counts an answer that has ended after so many tokens."""
        self._seen.setdefault(max_tokens.bit_length(), deque(maxlen=ANSWERS_SEEN)).append(tokens)

    def expect(self, max_tokens: int) -> int:
        """Tokens that get room: as many as nine in ten of the last answers had, 256 before any, and some ahead of them.

        Never above max_tokens.
        """
        seen = sorted(self._seen.get(max_tokens.bit_length(), ())) or [FIRST_EXPECTED]
        return min(max_tokens, seen[int(LIKELY * (len(seen) - 1))] + ROOM_AHEAD)


def common_prefix(tokens: list[int], others: list[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    length = min(len(tokens), len(others))
    if tokens[:length] == others[:length]:
        return length
    return next(place for place in range(length) if tokens[place] != others[place])


@dataclass(frozen=True)
class TokenScore:
    """Of one token.

    Attributes:
        logprob: natural logarithm; -inf where a processor has excluded it.
        top: the likeliest tokens by id, and the same of each, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_scores(drawn: Iterable[tuple[mx.array, int, int | None]]) -> list[TokenScore | None]:
    """Of log-probabilities (V,), the token that was drawn, and how many likeliest ones are wanted: None is nothing.

    All are worked out at once, and waited for once.
    """
    rows, scores = list(drawn), dict[int, TokenScore]()
    if counts := {row: count for row, (_, _, count) in enumerate(rows) if count is not None}:
        logprobs = mx.stack([rows[row][0] for row in counts]).astype(mx.float32)  # (n, V)
        tokens = mx.array([rows[row][1] for row in counts])
        chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
        ids = likeliest = mx.zeros((len(counts), 0))
        if top := min(max(counts.values()), logprobs.shape[1]):
            places = mx.argpartition(-logprobs, kth=top - 1, axis=1)[:, :top]  # (n, top)
            values = mx.take_along_axis(logprobs, places, axis=1)
            order = mx.argsort(-values, axis=1)
            ids, likeliest = mx.take_along_axis(places, order, axis=1), mx.take_along_axis(values, order, axis=1)
        mx.eval(chosen, ids, likeliest)
        numbers: list[Any] = [chosen.tolist(), ids.tolist(), likeliest.tolist()]
        for (row, count), value, which, best in zip(counts.items(), *numbers, strict=True):
            scores[row] = TokenScore(value, tuple(zip(which[:count], best[:count], strict=True)))
    return [scores.get(row) for row in range(len(rows))]
