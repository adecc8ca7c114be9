"""Jobs and their output, passed between the event loop and the worker; snapshots of memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from mlx_kv.generation.generate import StopStrings
from mlx_kv.generation.grammar import GrammarProcessor
from mlx_kv.generation.sequence import BatchToken, TokenScore
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.generation.statistics import SpeculationStatistics
from mlx_kv.prefixes.index import packed
from mlx_kv.server.memory import BatchOccupancy

_numbers = count(1)


@dataclass(eq=False)
class Job:
    """A prompt to be continued, for one choice of a request.

    Fields from `joined` on are written by the worker.

    Attributes:
        tokens: of the prompt.
        sampling: without a seed, the thread's random numbers are used.
        top_logprobs: number of likeliest tokens reported with each token; None reports no log-probabilities.
        keep: whether prompt and answer are added to the prefix cache.
        grammar: constrains the answer; None is unconstrained.
        on_match: called in the worker's thread when `cached` is set.
        joined: whether it has a row: in prefill, or decoding.
        cached: prompt tokens found in the prefix cache.
        read: prompt tokens read so far, cached ones included.
        drafted, accepted: draft tokens of the last pass, and accepted ones so far.
        evicted: tokens no longer in its caches, those evicted before they were cached included.
        answer: tokens so far.
        resumed: tokens of the answer that are read with the prompt, since the row was lost and starts again.
    """

    tokens: list[int]
    max_tokens: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    top_logprobs: int | None = None
    stop_strings: StopStrings = field(default_factory=StopStrings)
    keep: bool = True
    grammar: GrammarProcessor | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    since: float = field(default_factory=time.monotonic)
    on_match: Callable[[], None] = lambda: None
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
        """Tokens that a row reads before it decodes: the prompt, and the resumed part of the answer."""
        return [*self.tokens, *self.answer[: self.resumed]] if self.resumed else self.tokens

    @cached_property
    def prompt(self) -> bytes:
        """`to_read`, packed: waiting jobs are compared with others at every step."""
        return packed(self.to_read)

    def resume(self) -> None:
        """Called when the row is lost: the next one reads all tokens so far, and continues from there."""
        self.resumed = len(self.answer)
        self.__dict__.pop("prompt", None)

    @property
    def known(self) -> list[int]:
        """All tokens so far: prompt and answer."""
        return [*self.tokens, *self.answer]


@dataclass(frozen=True)
class OutputChunk:
    """New output of one job.

    Attributes:
        text: may be empty.
        tokens: number of tokens since the last chunk.
        scores: (token id, score) of the tokens that have a text, if the job has `top_logprobs`.
        finish_reason: in the last chunk: "stop" or "length", or "error".
        error: message for the client.
        status: HTTP status of the error.
    """

    job: Job
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    status: int = 500
    scores: tuple[tuple[int, TokenScore], ...] = ()

    def joined(self, following: OutputChunk) -> OutputChunk:
        """This chunk and the following one as one."""
        text, tokens = self.text + following.text, self.tokens + following.tokens
        scores = self.scores + following.scores
        return OutputChunk(self.job, text, tokens, following.finish_reason, scores=scores)


@dataclass(frozen=True)
class Snapshot:
    """Memory of the worker at one moment.

    Attributes:
        decoding, reading: jobs that decode and jobs in prefill, in the order of the rows of `occupancy`.
        generated: tokens of each of them.
        active_memory, prompt_memory: bytes of all arrays, and of cached prefixes.
        speculation: statistics of drafts since the engine was made; None without drafts.
        planned: maximum bytes of the current rows.
        freed_memory: bytes of freed buffers that MLX keeps for reuse, of this process.
    """

    occupancy: BatchOccupancy = field(default_factory=BatchOccupancy)
    decoding: tuple[Job, ...] = ()
    generated: tuple[int, ...] = ()
    tokens_per_second: float = 0.0
    active_memory: int = 0
    prompt_memory: int = 0
    speculation: SpeculationStatistics | None = None
    planned: int = 0
    reading: tuple[Job, ...] = ()
    freed_memory: int = 0


def output_of(
    tokens: Iterable[BatchToken], active: Mapping[int, Job]
) -> tuple[list[OutputChunk], list[tuple[Job, BatchToken]]]:
    """The output of each job that has tokens in a step, and the jobs that end in it, with their last tokens.

    A token that ends a job by a stop string has no finish_reason: the engine would continue.

    Args:
        active: jobs of the engine, by number. Others have ended before.
    """
    chunks: dict[int, OutputChunk] = {}
    ended: dict[int, tuple[Job, BatchToken]] = {}
    for token in tokens:
        job = active.get(token.index)
        if job is None or token.index in ended:
            continue  # ended by a stop string earlier in this step
        job.answer.append(token.token)
        text, finish = job.stop_strings.feed(token.text), token.finish_reason
        if job.stop_strings.stopped:
            finish = "stop"
        elif finish is not None:
            text += job.stop_strings.finish()
        ends = token.finish_reason == "stop"  # with a token that has no text
        scores = () if token.score is None or ends else ((token.token, token.score),)
        chunk = OutputChunk(job, text, 1, finish, scores=scores)
        chunks[job.number] = chunks[job.number].joined(chunk) if job.number in chunks else chunk
        grammar = None if job.stop_strings.stopped or finish != "stop" else job.grammar
        if grammar is not None and (why := grammar.error_in(job.answer)):
            error = f"the grammar could not be followed any longer: {why}"
            chunks[job.number] = OutputChunk(job, finish_reason="error", error=error, status=400)
        if finish is not None:
            ended[job.number] = job, token
    return list(chunks.values()), list(ended.values())
