"""Rows: an engine, the prompts before it, its cached prefixes and the memory of its rows.

Everything runs in the worker's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_kv.communicator import Communicator
from mlx_kv.generation.engine import Engine
from mlx_kv.generation.sequence import BatchToken, TokenSequence
from mlx_kv.generation.two_pass_prefill import Instructions
from mlx_kv.mlxlm.traverse import leaves
from mlx_kv.policy import CachePolicy
from mlx_kv.prefixes.reader import PromptReader
from mlx_kv.ranks.engine import lead
from mlx_kv.ranks.group import RankGroup
from mlx_kv.ranks.link import RanksError
from mlx_kv.server.job import Job, OutputChunk, output_of
from mlx_kv.server.memory import plan_rows, with_shared
from mlx_kv.server.models import Models, WorkerSettings
from mlx_kv.server.monitor import Monitor
from mlx_kv.server.prefill import PrefillScheduler
from mlx_kv.server.prefix_report import match_prefix
from mlx_kv.server.tiered_prefixes import TieredPrefixes

ENGINE_TRIES, ENGINE_PAUSE = 3, 0.5  # attempts to restart an engine; seconds in between
NO_MEMORY = ("unable to allocate", "attempting to allocate", "out of memory", "insufficient memory")
log = logging.getLogger("mlx_kv.server")


def policy_name(policy: CachePolicy) -> str:
    """A policy in words."""
    settings = [name for name in policy.changed() if name != "growth"]
    return ", ".join(f"{name} {_in_words(getattr(policy, name))}" for name in settings) or "all tokens as they are"


def _in_words(setting: Any) -> str:
    if isinstance(setting, tuple):
        return "/".join(map(_in_words, setting))
    if callable(getattr(setting, "encode", None)) and not isinstance(setting, str):  # a codec object
        return f"{setting.name} {setting.packed.bits}" if setting.packed is not None else str(setting.name)
    return "none" if setting is None else str(setting)


def out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory has run out: MLX's messages on a CPU, with Metal, and with CUDA."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or any(words in message for words in NO_MEMORY)


class PolicyRows:
    """The jobs that have a row, from when they get one to their last token.

    Args:
        open_prefixes: opens the cached prefixes, given a function that returns the fingerprint of their caches.
        deliver: called with the output of each step.
        group: the ranks of which this is the first; None is a single machine.

    Attributes:
        active: jobs with a row, by number.
        plan: memory of rows.
    """

    def __init__(
        self,
        models: Models,
        settings: WorkerSettings,
        policy: CachePolicy,
        monitor: Monitor,
        open_prefixes: Callable[[Callable[[], str]], TieredPrefixes],
        deliver: Callable[[list[OutputChunk]], None],
        group: RankGroup | None = None,
    ) -> None:
        self._models, self._settings, self.policy = models, settings, policy
        self._monitor, self._metrics, self._output, self._group = monitor, monitor.metrics, deliver, group
        self._instructions = Instructions.for_policy(policy, models.tokenizer, models.model)
        self._open_prefixes = open_prefixes
        self.active: dict[int, Job] = {}

    def begin(self) -> None:
        """Makes the engine, and opens the cached prefixes.

        Raises:
            ValueError: the model does not support the policy.
        """
        models, settings = self._models, self._settings
        self._make_engine()
        try:
            self.prefixes = self._open_prefixes(lambda: settings.fingerprint(models, self.policy, self.engine))
            self._make_prefill()
            drafts = models.draft is not None or settings.drafting.drafter is not None
            drafted = settings.drafting.draft_tokens if drafts else 0
            self.plan = plan_rows(models, self.policy, drafted, settings.max_batch_size, settings.prefill_step_size)
        except BaseException:
            self.engine.close()
            raise

    def _make_engine(self) -> None:
        def make(communicator: Communicator) -> Engine:
            return self._settings.engine(self._models, self.policy, self._instructions, communicator)

        self.engine = lead(make, self._group)

    def _make_prefill(self) -> None:
        step_size = self._settings.prefill_step_size
        self.prefill = PrefillScheduler(self.engine, self.prefixes, step_size, self._instructions, self._matched)

    def _jobs(self, numbers: list[int]) -> list[Job]:
        return [self.active[number] for number in numbers]

    @property
    def decoding(self) -> list[Job]:
        """The jobs that decode, in the order of the rows of the engine's caches."""
        return self._jobs(self.engine.rows)

    @property
    def reading(self) -> list[tuple[list[Job], list[Any]]]:
        """The jobs whose prompts are being read, with their caches."""
        return [(self._jobs(self.engine.pending), self.engine.reading), *self.prefill.caches]

    @property
    def waits(self) -> bool:
        """Whether `step` has nothing to do until a job is added or the store has answered."""
        return not self.engine.busy and self.prefill.waits

    def update_progress(self) -> None:
        """Copies the progress of each job into its fields."""
        for number, progress in self.engine.progress.items():
            if (job := self.active.get(number)) is not None:
                job.read = len(job.tokens) - progress.left
                job.drafted, job.accepted = progress.drafted, progress.accepted
        for job, tokens in self.prefill.read.items():
            job.read = tokens

    def planned(self, coming: Job | None = None) -> int:
        """Maximum bytes of all rows, and of one job that may get a row.

        A batch that has just lost its longest row may hold more than the others need: then what it holds counts.
        """
        jobs = [*self.active.values(), *(() if coming is None else (coming,))]
        if not jobs:
            return 0
        slots = [self.plan.slots(len(job.tokens), job.max_tokens) for job in jobs]
        if shares := self.plan.shares(slots):
            slots = with_shared(slots, [job.prompt if job.keep else None for job in jobs])
        needed, decoding = self.plan.together(slots), len(self.engine.rows)
        if not decoding:
            return needed
        allocated = sum(int(cache.nbytes) for cache in leaves(self.engine.caches))
        return max(needed, allocated if shares else allocated * len(jobs) // decoding)

    # --- jobs -----------------------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Gives a job a row."""
        self.active[job.number], job.joined = job, True  # from here on, a failure ends it
        self._begin(job)

    def _begin(self, job: Job) -> None:
        if self._settings.keeps_prompts:
            self.prefill.add(job)
        else:
            job.on_match()
            self._submit(job)

    def _matched(self, job: Job, reused: int) -> None:
        """Reports how much of a prompt is reused, unless that was reported before the row was lost."""
        if not job.resumed:
            job.cached = reused
            match = match_prefix(job.prompt, reused, self.prefixes.memory)
            self._monitor.prefixes.add(job, match, self._models.tokenizer.decode)
            job.on_match()

    def step(self) -> None:
        """Makes one step, and delivers its output."""
        ready = self.prefill.step(self._jobs(self.engine.pending), self.decoding) if self.prefill.jobs else []
        for job, reader in ready:
            if not job.resumed:  # else counted before
                (self._metrics.prefix_hits if reader.reused else self._metrics.prefix_misses).inc()
                self._metrics.cached_tokens.inc(job.cached)
            self._count_evicted([job], reader.caches)
            self._submit(job, reader)
        if self.engine.busy:
            self._deliver(self.engine.step())

    def _submit(self, job: Job, reader: PromptReader | None = None) -> None:
        """Submits a job to the engine, with caches if a part of its prompt has been read."""
        sampler = job.sampling.sampler(len(job.to_read), self._models.tokenizer)
        read, caches = (0, None) if reader is None else (reader.read, reader.caches)
        before, tokens, max_tokens = job.to_read[:read], job.to_read[read:], job.max_tokens - job.resumed
        sequence = TokenSequence(job.number, tokens, max_tokens, self._detokenizer(job), sampler, caches, before)
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
        """A detokenizer for the tokens after those that were delivered before the row was lost."""
        detokenizer: Any = self._models.tokenizer.detokenizer
        for token in job.answer[: job.resumed]:
            detokenizer.add_token(token)
        if job.resumed:
            _ = detokenizer.last_segment  # delivered before, but for an incomplete character
        return detokenizer

    def _deliver(self, tokens: list[BatchToken]) -> None:
        """Delivers the tokens of a step, and ends jobs."""
        if self.policy.budget is not None:
            self._count_evicted(self.decoding, self.engine.caches)
        chunks, ended = output_of(tokens, self.active)
        for chunk in chunks:
            if chunk.finish_reason is not None:
                self._finish(chunk.job, chunk.finish_reason)
        if chunks:
            self._monitor.count_generated(sum(chunk.tokens for chunk in chunks))
            self._output(chunks)
            if any(len(chunk.job.answer) == chunk.tokens for chunk in chunks):
                time.sleep(5e-5)  # a first token: let the event loop send it before the next step is built
        for job, token in ended:  # after delivery
            stopped = token.finish_reason is None  # by a stop string, so that the engine would go on
            self._count_evicted([job], token.caches)
            if self._settings.keeps_prompts and job.keep:
                self.prefill.keep(job, self.engine.extract(job.number) if stopped else token.caches)
            if stopped:
                self.engine.cancel(job.number)

    def _count_evicted(self, jobs: list[Job], caches: list[object] | None) -> None:
        if self.policy.budget is not None:
            self._monitor.count_evicted(jobs, caches)

    def cancel(self, job: Job) -> bool:
        """Ends a job at any stage; returns whether it had a row here."""
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
        """Ends jobs with an error."""
        for job in jobs:
            self._finish(job, "error")
        if jobs:
            chunks = [OutputChunk(job, finish_reason="error", error=error, status=status) for job in jobs]
            self._output(chunks)

    # --- when a step fails, and at the end ------------------------------------------------------------------------

    def recover(self, out_of_memory: bool) -> None:
        """Restarts the engine after a step failed. All jobs end with an error.

        If memory has run out, only the job that needs most of it ends, and the others continue where they were.

        Raises:
            Exception: the engine cannot be restarted.
        """
        self._metrics.engine_failures.inc()
        if out_of_memory:
            self._end_one()
        else:
            self.fail(list(self.active.values()), "the server failed while it generated: see its log")
        self._restart()
        for job in self.active.values():
            job.resume()
            self._begin(job)

    def _end_one(self) -> None:
        """Ends the newest job without an answer, else the longest, since memory has run out."""
        jobs = list(self.active.values())
        unanswered = [job for job in jobs if not job.answer]
        for job in unanswered[-1:] or sorted(jobs, key=lambda job: len(job.known))[-1:]:
            self._metrics.out_of_memory.inc()
            error = "the server ran out of memory at this request: try again later, or send a shorter prompt"
            self.fail([job], error, 503)
        self.prefixes.memory.shrink(0)

    def _restart(self) -> None:
        del self.engine, self.prefill  # first: memory may not suffice for two
        mx.clear_cache()
        for attempt in range(1, ENGINE_TRIES + 1):
            try:
                self._make_engine()
                self._make_prefill()
                return
            except RanksError:
                raise
            except Exception as error:
                if attempt == ENGINE_TRIES:
                    raise
                log.warning("the engine could not be restarted: %s; trying again", error)
            time.sleep(ENGINE_PAUSE)

    def close(self) -> bool:
        """Closes the engine and the prefixes; returns whether all prefixes are written."""
        self.engine.close()
        return self.prefixes.close()
