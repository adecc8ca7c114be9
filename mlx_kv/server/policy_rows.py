"""The jobs of one cache policy: an engine, the prompts on their way to it, and what was read for others before.

Decides what is done with a job from when it gets a row to its last token, and what becomes of all of them when a step
fails. Knows nothing about who else is served, nor about threads: all is called in the worker's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_kv.communicator import Communicator
from mlx_kv.generation.engine import Engine
from mlx_kv.generation.sequence import BatchToken, TokenSequence
from mlx_kv.generation.two_pass_prefill import Instructions
from mlx_kv.mlxlm.observing import show_attention
from mlx_kv.policy import CachePolicy
from mlx_kv.prefixes.reader import PromptReader
from mlx_kv.ranks.engine import LedEngine, lead
from mlx_kv.ranks.group import RankGroup
from mlx_kv.ranks.link import RanksError
from mlx_kv.server.fingerprint import serving_fingerprint
from mlx_kv.server.job import Job, OutputChunk
from mlx_kv.server.metrics import Metrics
from mlx_kv.server.models import EngineSettings, Models
from mlx_kv.server.monitor import Monitor
from mlx_kv.server.prefill import PrefillScheduler
from mlx_kv.server.row_output import output_of
from mlx_kv.server.tiered_prefixes import TieredPrefixes

ENGINE_TRIES, ENGINE_PAUSE = 3, 0.5  # how often an engine is made anew before the worker gives up; seconds in between
NO_MEMORY = ("unable to allocate", "attempting to allocate", "out of memory", "insufficient memory")
log = logging.getLogger("mlx_kv.server")


@dataclass(frozen=True)
class Served:
    """What the rows of all policies have in common.

    Attributes:
        settings: of engines.
        deliver: called with the output of each step.
        group: the ranks of which this is the first.
    """

    models: Models
    settings: EngineSettings
    metrics: Metrics
    monitor: Monitor
    deliver: Callable[[list[OutputChunk]], None]
    group: RankGroup | None = None


class PolicyRows:
    """Continues jobs under one policy.

    Args:
        open_prefixes: makes the place where what was read is kept, given what tells whose it is.

    Attributes:
        active: its jobs by number, from when they have a row to their end.
    """

    def __init__(
        self, served: Served, policy: CachePolicy, open_prefixes: Callable[[Callable[[], str]], TieredPrefixes]
    ) -> None:
        self._served, self.policy = served, policy
        self._metrics, self._monitor, self._keeps = served.metrics, served.monitor, served.settings.keeps
        self._asked = Instructions.for_policy(policy, served.models.tokenizer, served.models.model)
        self._open_prefixes = open_prefixes
        self.active: dict[int, Job] = {}

    def begin(self) -> None:
        """Makes the engine, and what goes with it.

        Raises:
            ValueError: what the model or the policy refuses.
        """
        self._make_engine()
        try:
            self.prefixes = self._open_prefixes(self._fingerprint)
            self._make_prefill()
        except BaseException:
            self.engine.close()
            raise

    def engine_for(self, communicator: Communicator) -> Engine:
        return self._served.settings.engine(self._served.models, self.policy, self._asked, communicator)

    def try_out(self) -> None:
        """Raises ValueError for what the model or the policy refuses."""
        engine = lead(self.engine_for, self._served.group)
        try:
            show_attention(self._served.models.model, engine.make_caches())
        finally:
            engine.close()

    def _make_engine(self) -> None:
        self.engine = lead(self.engine_for, self._served.group)

    def _make_prefill(self) -> None:
        self.prefill = PrefillScheduler(
            self.engine,
            self.prefixes,
            self._served.settings.prefill_step_size,
            instructions=self._asked,
            reading=lambda: [self.active[number] for number in self.engine.pending],
            decoding=lambda: self.decoding,
        )

    def _fingerprint(self) -> str:
        """What tells the caches of this model, draft model and policy from those of others."""
        models = self._served.models
        return serving_fingerprint(models.model, models.draft, self.policy, self._served.settings.drafting, self.engine)

    @property
    def decoding(self) -> list[Job]:
        """The jobs that decode, in the order of the rows of the engine's caches."""
        return [self.active[number] for number in self.engine.rows]

    @property
    def waits(self) -> bool:
        """Whether `step` has nothing to do, until a job joins or the disk has answered."""
        return not self.engine.busy and self.prefill.waits

    def note_progress(self) -> None:
        """Says in its jobs how far each is, for those who watch."""
        read = self.prefill.read
        for number, progress in self.engine.progress.items():
            if (job := self.active.get(number)) is not None:
                job.read = len(job.tokens) - progress.left
                job.drafted, job.accepted = progress.drafted, progress.accepted
        for job, tokens in read.items():
            job.read = tokens

    def tell_dropped(self) -> None:
        """Nothing is left to be done for long: other ranks hear which caches are gone."""
        if isinstance(self.engine, LedEngine):
            self.engine.numbers.tell_dropped()

    # --- jobs -----------------------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """It has a row."""
        self.active[job.number], job.joined = job, True  # from here on, whatever fails ends it
        self._begin(job)

    def _begin(self, job: Job) -> None:
        if self._keeps:
            self.prefill.add(job)
        else:
            self._submit(job)

    def step(self) -> None:
        """Some work, and what came of it is handed on."""
        for job, reader in self.prefill.step():
            if not job.resumed:  # else that was said before
                job.cached = reader.reused
                (self._metrics.prefix_hits if reader.reused else self._metrics.prefix_misses).inc()
                self._metrics.cached_tokens.inc(job.cached)
            self._count_evicted([job], reader.caches)
            self._submit(job, reader)
        if self.engine.busy:
            self._hand_on(self.engine.step())

    def _submit(self, job: Job, reader: PromptReader | None = None) -> None:
        """Gives a job to the engine, with caches if any of its prompt has been read."""
        sampler = job.sampling.sampler(len(job.to_read), self._served.models.tokenizer)
        read, caches = (0, None) if reader is None else (reader.read, reader.caches)
        before, rest, most = job.to_read[:read], job.to_read[read:], job.max_tokens - job.resumed
        sequence = TokenSequence(job.number, rest, most, self._detokenizer(job), sampler, caches, before)
        grammar = () if job.grammar is None else (job.grammar,)
        sequence.processors, sequence.top_logprobs = (*job.sampling.processors(), *grammar), job.top_logprobs
        sequence.private = not job.keep
        try:
            self.engine.submit(sequence)
        except ValueError as error:
            self.fail([job], str(error), 400)
            return
        if not job.resumed:
            self._metrics.prompt_tokens.inc(len(job.tokens))

    def _detokenizer(self, job: Job) -> Any:
        """Makes text of the tokens that come, after those that a client has."""
        detokenizer: Any = self._served.models.tokenizer.detokenizer
        for token in job.answer[: job.resumed]:
            detokenizer.add_token(token)
        if job.resumed:
            _ = detokenizer.last_segment  # told before, but for what was held back
        return detokenizer

    def _hand_on(self, tokens: list[BatchToken]) -> None:
        """Passes on what a step gave."""
        if self.policy.budget is not None:
            self._count_evicted(self.decoding, self.engine.caches)
        chunks, ended = output_of(tokens, self.active)
        for chunk in chunks:
            if chunk.finish_reason is not None:
                self._finish(chunk.job, chunk.finish_reason)
        if chunks:
            self._monitor.count_generated(sum(chunk.tokens for chunk in chunks))
            self._served.deliver(chunks)
            if any(len(chunk.job.answer) == chunk.tokens for chunk in chunks):
                time.sleep(5e-5)  # a first token is waited for: let it out before the next step is built
        for job, token in ended:  # when the clients know
            stopped = token.finish_reason is None  # by a text: the engine would go on
            self._count_evicted([job], token.caches)
            if self._keeps and job.keep:
                self.prefill.keep(job, self.engine.extract(job.number) if stopped else token.caches)
            if stopped:
                self.engine.cancel(job.number)

    def _count_evicted(self, jobs: list[Job], caches: list[object] | None) -> None:
        if self.policy.budget is not None:
            self._monitor.count_evicted(jobs, caches)

    def cancel(self, job: Job) -> bool:
        """Lets a job go, wherever it stands; says whether it was here."""
        if job.number not in self.active:
            return False
        reader = self.prefill.remove(job)
        self._count_evicted([job], None if reader is None else reader.caches)
        self.engine.cancel(job.number)
        self._finish(job, "cancelled")
        return True

    def _finish(self, job: Job, reason: str) -> None:
        self.active.pop(job.number, None)
        self.prefill.wake()
        self._metrics.finished.labels(reason).inc()

    def fail(self, jobs: list[Job], error: str, status: int = 500) -> None:
        """These jobs end with an error."""
        for job in jobs:
            self._finish(job, "error")
        if jobs:
            self._served.deliver([OutputChunk(job, finish_reason="error", error=error, status=status) for job in jobs])

    # --- when a step fails, and at the end ------------------------------------------------------------------------

    def recover(self, out_of_memory: bool) -> None:
        """A step has failed: its rows are lost, but not the server.

        Where memory has run out, the job that wants most of it ends, and the others begin anew with what they know.

        Raises:
            Exception: the engine cannot be made anew; there is nothing more to be done then.
        """
        self._metrics.engine_failures.inc()
        if out_of_memory:
            self._end_one()
        else:
            self.fail(list(self.active.values()), "the server failed while it generated: see its log")
        self._make_anew()
        for job in self.active.values():
            job.resume()
            self._begin(job)

    def _end_one(self) -> None:
        """Memory has run out: the job ends that came last of those without an answer, else the longest."""
        jobs = list(self.active.values())
        unanswered = [job for job in jobs if not job.answer]
        for job in unanswered[-1:] or sorted(jobs, key=lambda job: len(job.known))[-1:]:
            self._metrics.out_of_memory.inc()
            why = "the server ran out of memory at this request: try again later, or send a shorter prompt"
            self.fail([job], why, 503)
        self.prefixes.memory.shrink(0)

    def _make_anew(self) -> None:
        del self.engine, self.prefill  # and with them what may be too much for two
        mx.clear_cache()
        for tried in range(1, ENGINE_TRIES + 1):
            try:
                self._make_engine()
                self._make_prefill()
                return
            except RanksError:
                raise
            except Exception as error:
                if tried == ENGINE_TRIES:
                    raise
                log.warning("the engine could not be made anew: %s; trying once more", error)
            time.sleep(ENGINE_PAUSE)

    def close(self) -> None:
        """Lets the engine go; what was read of prompts stays."""
        self.engine.close()


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory has run out, as MLX says it on a CPU, with Metal, and with CUDA."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(words in said for words in NO_MEMORY)
