"""What is passed between requests and the worker: a job, the chunks of its output, and a snapshot of memory.

Decides nothing. Knows nothing about threads or HTTP.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from mlx_kv.generation.grammar.processor import GrammarProcessor
from mlx_kv.generation.logprobs import TokenScore
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.generation.speculation.statistics import SpeculationStatistics
from mlx_kv.generation.stop_strings import StopStrings
from mlx_kv.policy import CachePolicy
from mlx_kv.prefixes.index import packed
from mlx_kv.server.occupancy import BatchOccupancy

_numbers = count(1)


@dataclass(eq=False)
class Job:
    """A prompt to be continued for one request.

    The worker writes the fields that have a default, others only read them.

    Attributes:
        tokens: of the prompt.
        sampling: how its tokens are chosen; without a seed by the random numbers of the thread.
        top_logprobs: how many likeliest tokens are told with each; None tells no log-probabilities at all.
        policy: how its keys and values are kept; None is as the server's.
        keep: whether what is read and said is kept for others.
        slot: in which it is to be shown; None is any.
        grammar: what keeps its answer to a form; None lets it be any.
        joined: whether it has a place among the rows: its prompt is being read, or it decodes.
        cached: tokens of the prompt that had been read before.
        read: tokens of the prompt that have been read, those among them.
        drafted, accepted: tokens that were drafted in the last pass, and those that were right so far.
        evicted: tokens that are no longer in its caches, those that were evicted for others before among them.
        answer: tokens so far.
        resumed: of them, those that are read with the prompt: its row was lost, and begins anew after them.
    """

    tokens: list[int]
    max_tokens: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    top_logprobs: int | None = None
    stop_strings: StopStrings = field(default_factory=StopStrings)
    policy: CachePolicy | None = None
    keep: bool = True
    grammar: GrammarProcessor | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    since: float = field(default_factory=time.monotonic)
    slot: int | None = None
    joined: bool = False
    cached: int = 0
    read: int = 0
    drafted: int = 0
    accepted: int = 0
    evicted: int = 0
    answer: list[int] = field(default_factory=list)
    resumed: int = 0

    @property
    def to_read(self) -> list[int]:
        """What a row reads before it goes on: the prompt, and what is resumed."""
        return [*self.tokens, *self.answer[: self.resumed]] if self.resumed else self.tokens

    @cached_property
    def prompt(self) -> bytes:
        """That, packed: who waits is compared with others at every step."""
        return packed(self.to_read)

    def resume(self) -> None:
        """Its row is lost: the next one reads all that is known, and goes on from there."""
        self.resumed = len(self.answer)
        self.__dict__.pop("prompt", None)

    @property
    def known(self) -> list[int]:
        """All tokens so far."""
        return [*self.tokens, *self.answer]


@dataclass(frozen=True)
class OutputChunk:
    """What is new of one job.

    Attributes:
        text: may be empty.
        tokens: generated since the last chunk.
        scores: of those that have a text, by id, where the job wants them.
        finish_reason: with the last chunk: "stop" or "length", or "error".
        error: in words, for the client.
        status: of HTTP, that goes with an error.
    """

    job: Job
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    status: int = 500
    scores: tuple[tuple[int, TokenScore], ...] = ()

    def joined(self, following: OutputChunk) -> OutputChunk:
        """This chunk and the one after it as one."""
        text, tokens = self.text + following.text, self.tokens + following.tokens
        scores = self.scores + following.scores
        return OutputChunk(self.job, text, tokens, following.finish_reason, scores=scores)


@dataclass(frozen=True)
class Snapshot:
    """What was in memory a moment ago.

    Attributes:
        decoding: jobs that decode, in the order of the rows of `occupancy`.
        generated: tokens of each of them.
        active_memory, prompt_memory: bytes of all arrays, and of prompts that are kept.
        speculation: what was drafted since the engine was made; None where nothing is.
        planned: bytes that the rows will take at the most.
    """

    occupancy: BatchOccupancy = field(default_factory=BatchOccupancy)
    decoding: tuple[Job, ...] = ()
    generated: tuple[int, ...] = ()
    tokens_per_second: float = 0.0
    active_memory: int = 0
    prompt_memory: int = 0
    speculation: SpeculationStatistics | None = None
    planned: int = 0
