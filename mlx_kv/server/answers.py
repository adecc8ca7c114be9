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
from mlx_kv.server.token_texts import TokenTexts


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

    def take(self, chunk: OutputChunk) -> Delta:
        """What a chunk of the worker's output adds."""
        self.generated += chunk.tokens
        if self.parser is None:
            delta = Delta(self.echo + chunk.text)
            self.echo = ""
        else:
            delta = self.parser.feed(chunk.text)
            self.reasoning_tokens += chunk.tokens if self.parser.reasons else 0
        if self.texts is not None:
            delta.logprobs += self.texts.of(chunk.scores)
        self.finish_reason = chunk.finish_reason or ""
        if self.finish_reason and self.parser is not None:
            delta.add(self.parser.finish())
            if self.parser.called and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        return delta


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
