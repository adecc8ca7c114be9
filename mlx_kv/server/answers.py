"""An answer as it comes, and what every API must say of it.

Decides what counts as used, and which text belongs to which choice of a request. Knows nothing about HTTP, nor about
the objects of any API: each has an `AnswerWriter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlx_kv.server.chat_output import ChatOutputParser, Delta
from mlx_kv.server.errors import ApiError
from mlx_kv.server.job import Job, OutputChunk
from mlx_kv.server.token_texts import TokenText, TokenTexts


@dataclass
class Choice:
    """One of the answers to a request.

    Attributes:
        index: among the answers; those to the first prompt come first.
        prompt: which of the request's prompts it continues.
        parser: of a chat; None leaves a text as it is.
        echo: what is said before the first token.
        texts: of tokens whose log-probabilities are told; None where they are not.
        answer: so far, where somebody adds it up.
        finish_reason: empty until it has ended.
    """

    index: int
    prompt: int
    job: Job
    parser: ChatOutputParser | None = None
    echo: str = ""
    texts: TokenTexts | None = None
    answer: Delta = field(default_factory=Delta)
    generated: int = 0
    reasoning_tokens: int = 0
    finish_reason: str = ""
    _held: list[TokenText] = field(default_factory=list)  # whose text is still to come, unless it is that of a mark

    def take(self, chunk: OutputChunk) -> Delta:
        """What a chunk of the worker's output adds."""
        self.generated += chunk.tokens
        spoke = self.parser is None or self.parser.speaks
        if self.parser is None:
            delta = Delta(self.echo + chunk.text)
            self.echo = ""
        else:
            delta = self.parser.feed(chunk.text)
            self.reasoning_tokens += chunk.tokens if self.parser.reasons else 0
        if self.texts is not None:
            delta.logprobs = self.texts.of(chunk.scores)
            speaks, held = self.parser is None or self.parser.speaks, self._held + delta.logprobs
            if spoke and speaks and not (delta.reasoning or delta.tool_calls):
                delta.spoken, self._held = (held, []) if delta.content else ([], held)
            else:
                delta.spoken, self._held = _made_of(delta.content, held, speaks), []
        self.finish_reason = chunk.finish_reason or ""
        if self.finish_reason and self.parser is not None:
            delta.add(self.parser.finish())
            delta.spoken += self._held
            if self.parser.called and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        return delta


def _made_of(text: str, tokens: list[TokenText], last: bool) -> list[TokenText]:
    """The last of some tokens that have a text, or the first: a mark before or after it is none of it."""
    taken: list[TokenText] = []
    for token in reversed(tokens) if last else tokens:
        if sum(len(each.text) for each in taken) >= len(text):
            break
        taken.append(token)
    return taken[::-1] if last else taken


@dataclass(frozen=True)
class Usage:
    """Tokens of a request: each prompt once, all answers, and which of the prompts had been read before."""

    prompt_tokens: int
    generated: int
    cached: int
    reasoning: int

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> Usage:
        first = {choice.prompt: choice.job for choice in reversed(choices)}
        return cls(
            sum(len(job.tokens) for job in first.values()),
            sum(choice.generated for choice in choices),
            sum(job.cached for job in first.values()),
            sum(choice.reasoning_tokens for choice in choices),
        )


class AnswerWriter(Protocol):
    """The objects of one answer, as an API has them.

    Attributes:
        waiting: what a stream says when there is nothing to say.
        last: what a stream ends with, whatever became of it.
    """

    waiting: bytes
    last: bytes

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """All answers, which have ended, in one object."""

    def begin(self, choices: Sequence[Choice]) -> bytes:
        """What a stream begins with."""

    def part(self, choice: Choice, delta: Delta) -> bytes:
        """More of an answer; its end where it has a `finish_reason`."""

    def end(self, choices: Sequence[Choice]) -> bytes:
        """All answers have ended."""

    def failed(self, error: ApiError) -> bytes:
        """Nothing more will come of a stream."""
