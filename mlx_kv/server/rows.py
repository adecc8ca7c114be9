"""Rows: models and settings, an engine, the jobs that have a row in it, their memory, and their cached prefixes.

Everything runs in the worker's thread, but work of the disk: that runs one task after the other in its own thread, on
bytes only. A failure of the disk costs a prompt the time to be read again, and never ends a row.
"""

from __future__ import annotations

import copy
import errno
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.layout import Append
from mlx_kv.cache.row_classes import min_saving
from mlx_kv.cache.segmented import SegmentedCache
from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.files.serialization import model_fingerprint
from mlx_kv.generation.admission import continue_from, shares_up_to, tokens_of
from mlx_kv.generation.engine import Engine, EngineSettings, make_engine
from mlx_kv.generation.prefill import Instructions
from mlx_kv.generation.sequence import ROOM_AHEAD, BatchToken, TokenSequence
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.mlxlm.attention import attends_by_class
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.heads import DraftHead, head_policy
from mlx_kv.mlxlm.traverse import is_ours, leaves, trim_prompt_cache
from mlx_kv.planning import Planner, RowMemory
from mlx_kv.policy import CachePolicy
from mlx_kv.prefixes.index import MIN_SHARED, min_tokens, shared
from mlx_kv.prefixes.memory import PromptMemory, RankMemory
from mlx_kv.prefixes.reader import draft_mark, needs_checkpoints
from mlx_kv.prefixes.store import PackedEntry, PromptStore, StoredPrompt
from mlx_kv.ranks.engine import lead
from mlx_kv.ranks.group import RankGroup
from mlx_kv.ranks.link import RanksError
from mlx_kv.server.json_http import SHUTTING_DOWN
from mlx_kv.server.memory import MemoryLimit, RowPlan, tokens_evicted, with_shared
from mlx_kv.server.monitor import Monitor, match_prefix
from mlx_kv.server.output import Job, OutputChunk, output_of

MAX_PENDING = 256 * 2**20  # bytes waiting to be written; further entries are dropped
RETRY_SECONDS = 10.0  # for which a disk that refused an entry gets no other
FULL = (errno.ENOSPC, errno.EDQUOT)
REFRESH_EVERY = 1.0  # seconds between two looks at entries of other processes
ENGINE_TRIES, ENGINE_PAUSE = 3, 0.5  # attempts to restart an engine; seconds in between
NO_MEMORY = ("unable to allocate", "attempting to allocate", "out of memory", "insufficient memory")
T = TypeVar("T")
log = logging.getLogger("mlx_kv.server")


# --- models, settings, and what is made of them -----------------------------------------------------------------------


@dataclass(frozen=True)
class Models:
    """A model, its tokenizer, and a draft model.

    Attributes:
        sampling: defaults for requests.
        policy: cache policy chosen for this model; None is that of the settings.
    """

    model: nn.Module
    tokenizer: Any
    draft: nn.Module | None = None
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    policy: CachePolicy | None = None

    @property
    def networks(self) -> list[nn.Module]:
        """The model, and the draft model if there is one."""
        return [self.model] if self.draft is None else [self.model, self.draft]


OpenStore = Callable[[Models], PromptStore]


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker.

    Attributes:
        policy: of the caches.
        max_batch_size, prefill_step_size: as in `EngineSettings`.
        max_wait: seconds that rows wait for their next token while prompts are read, as in `EngineSettings`.
        drafting: of speculative decoding.
        prompt_memory_bytes: of cached prefixes in memory; 0 keeps none, None is what the memory limit leaves.
        open_store: opens the prompt store; None is without one.
        memory_limit: bytes of weights, rows and cached prefixes; "device" is what the device has, None is no limit.
        warm_up: called while a GPU prepares itself for prompts of all lengths, with the shapes that are done and all;
            None leaves that to the first requests.
    """

    policy: CachePolicy = field(default_factory=CachePolicy)
    max_batch_size: int = 8
    prefill_step_size: int | None = None
    max_wait: float | None = None
    drafting: DraftSettings = field(default_factory=DraftSettings)
    prompt_memory_bytes: int | None = None
    open_store: OpenStore | None = None
    memory_limit: int | Literal["device"] | None = None
    warm_up: Callable[[int, int], None] | None = None

    @property
    def keeps_prompts(self) -> bool:
        """Whether prefixes are cached for later requests."""
        return self.open_store is not None or self.prompt_memory_bytes != 0

    def engine(self, models: Models, policy: CachePolicy, communicator: Communicator = LOCAL) -> Engine:
        """An engine for a policy.

        Raises:
            ValueError: the model does not support the policy.
        """
        settings = EngineSettings(
            self.max_batch_size,
            self.prefill_step_size,
            self.drafting,
            models.draft,
            return_caches=self.keeps_prompts or policy.budget is not None,  # also to count the last evictions
            instructions=Instructions.for_policy(policy, models.tokenizer, models.model),
            max_wait=self.max_wait,
        )
        return make_engine(models.model, set(models.tokenizer.eos_token_ids), policy, settings, communicator)

    def fingerprint(self, models: Models, policy: CachePolicy, engine: Engine) -> str:
        """Identifies the caches of a model, draft model, policy, and of how the engine makes room for drafts.

        Entries of a shared store are found under the same fingerprint only.
        """
        marks = [model_fingerprint(net) for net in models.networks]
        marks.append(str(policy))
        if models.draft is not None:
            marks.append(f"draft tokens {self.drafting.draft_tokens}")
        elif engine.speculation is not None:
            marks += draft_mark(engine.make_caches(), make_prompt_cache(models.model, policy, strict=False))
        return " ".join(marks)


def plan_rows(models: Models, policy: CachePolicy, drafted: int, batch: int, chunk: int | None = None) -> RowPlan:
    """The plan of a policy. Builds a graph of the model, and evaluates nothing.

    Args:
        drafted: maximum draft tokens per pass.
        batch: maximum rows.
        chunk: prompt tokens per prefill chunk; None is at most the policy's max_write.

    Raises:
        ValueError: the model does not support the policy.
    """
    planner = Planner(models.model, Instructions.for_policy(policy, models.tokenizer, models.model))
    in_classes = batch > 1 and attends_by_class(models.model)
    shares = in_classes and models.draft is None
    draft = models.draft
    of_draft = head_policy(draft, policy, drafted) if isinstance(draft, DraftHead) else CachePolicy()
    return RowPlan(
        planner.row(policy, step=1 + drafted, chunk=chunk or 0),
        RowMemory() if models.draft is None else Planner(models.draft).row(of_draft),
        drafted,
        2 * min_saving() if in_classes else None,
        shares_up_to(make_prompt_cache(models.model, policy)) if shares else 0,
    )


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


# --- rows -------------------------------------------------------------------------------------------------------------


class Rows:
    """The jobs that have a row, from when they get one to their last token.

    Args:
        wake: called from any thread when `step` has something to do.
        deliver: called with the output of each step.
        group: the ranks of which this is the first; None is a single machine.
        fits_prefix: whether a cached prefix of so many bytes fits beside all rows.

    Attributes:
        active: jobs with a row, by number.
        prefixes: cached prefixes.
        plan: memory of rows.

    Raises:
        ValueError: the model does not support the policy.
    """

    def __init__(
        self,
        models: Models,
        settings: WorkerSettings,
        policy: CachePolicy,
        monitor: Monitor,
        wake: Callable[[], None],
        deliver: Callable[[list[OutputChunk]], None],
        limit: MemoryLimit,
        group: RankGroup | None = None,
        fits_prefix: Callable[[int], bool] = lambda nbytes: True,
    ) -> None:
        self._fits_prefix = fits_prefix
        self._models, self._settings, self.policy = models, settings, policy
        self._monitor, self._metrics, self._output, self._group = monitor, monitor.metrics, deliver, group
        self.active: dict[int, Job] = {}
        self._make_engine()
        try:
            self.prefixes = TieredPrefixes(
                (PromptMemory if group is None else RankMemory)(limit.for_prompts(settings.prompt_memory_bytes)),
                None if settings.open_store is None else settings.open_store(models),
                wake,
                lambda: settings.fingerprint(models, policy, self.engine),
            )
            drafts = models.draft is not None or settings.drafting.drafter is not None
            drafted = settings.drafting.draft_tokens if drafts else 0
            self.plan = plan_rows(models, policy, drafted, settings.max_batch_size, settings.prefill_step_size)
        except BaseException:
            self.engine.close()
            raise

    def _make_engine(self) -> None:
        self.engine = lead(partial(self._settings.engine, self._models, self.policy), self._group)
        self._checkpoints = self._settings.keeps_prompts and needs_checkpoints(self.engine.make_caches())

    @property
    def decoding(self) -> list[Job]:
        """The jobs that decode, in the order of the rows of the engine's caches."""
        return [self.active[number] for number in self.engine.rows]

    @property
    def reading(self) -> list[tuple[list[Job], list[Any]]]:
        """The jobs whose prompts are being read, with their caches."""
        return [([self.active[number] for number in numbers], caches) for numbers, caches in self.engine.reading]

    def update_progress(self) -> None:
        """Copies the progress of each job into its fields."""
        for number, progress in self.engine.progress.items():
            if (job := self.active.get(number)) is not None:
                job.read = len(job.tokens) - progress.left
                job.drafted, job.accepted = progress.drafted, progress.accepted

    def planned(self, candidate: Job | None = None) -> int:
        """Bytes of all rows with the answers that they are likely to have, and of one job that may get a row.

        A batch that has just lost its longest row may hold more than the others need: then what it holds counts, but
        for segments that are cached prefixes.
        """
        jobs = [*self.active.values(), *(() if candidate is None else (candidate,))]
        if not jobs:
            return 0
        slots = [self.plan.slots(len(job.tokens), job.room if job.has_row else self._expect(job)) for job in jobs]
        if shares := self.plan.shares(slots):
            slots = with_shared(slots, [job.prompt if job.keep else None for job in jobs])
        needed, decoding = self.plan.together(slots), len(self.engine.rows)
        if not decoding:
            return needed
        caches = list(leaves(self.engine.caches))
        segments = [each for cache in caches if isinstance(cache, SegmentedCache) for each in cache.segments]
        allocated = sum(int(cache.nbytes) for cache in caches) - self.prefixes.memory.held_bytes(segments)
        return max(needed, allocated if shares else allocated * len(jobs) // decoding)

    def _expect(self, job: Job) -> int:
        """Tokens of an answer for which a row gets room at first."""
        return min(job.max_tokens, job.resumed + self.engine.answers.expect(job.max_tokens))

    def outgrow(self, fits: Callable[[int], bool]) -> bool:
        """Plans for more tokens of the answers that outgrow what was expected; returns whether there is one.

        Args:
            fits: whether rows of so many bytes do; without slack, where those with it do not.
        """
        jobs = [job for job in self.active.values() if job.room < min(len(job.answer) + ROOM_AHEAD, job.max_tokens)]
        for slack in (True, False) if jobs else ():
            for job in jobs:
                job.room = self.plan.grow(len(job.tokens), len(job.answer) + ROOM_AHEAD, job.max_tokens, slack)
            if fits(self.planned()):
                break
        for job in jobs:
            self.engine.make_room(job.number, job.room)
        return bool(jobs)

    def end_if_too_long(self, limit: MemoryLimit) -> None:
        """Ends the only job if it needs more memory than there is."""
        (job,) = self.active.values()
        if (error := limit.refusal(self.plan, len(job.tokens), job.room)) is not None:
            self._keep_read(job)
            self.engine.cancel(job.number)
            self.fail([job], error, 400)

    def preempt(self) -> Job | None:
        """Takes the row of the newest job, which goes on later where it was; None if that is not possible at this step.

        What it has read is cached as at its end. What a budget has evicted depends on when it did, so such a row keeps
        its few tokens.
        """
        job = self.active[max(self.active)]
        if self.policy.budget is None:
            self._keep_read(job)
            job.caches = None
        elif (caches := self.engine.extract(job.number)) is not None:
            if self._keeps(job):
                self._keep(job, caches)
            read = tokens_of(caches)
            if not self.engine.trim(caches, max(0, read - len(job.all_tokens) + 1)):
                return None
            job.caches = caches, min(read, len(job.all_tokens) - 1)
        elif job.number in self.engine.rows:
            return None
        self.engine.cancel(job.number)
        del self.active[job.number]
        job.has_row = False
        job.resume()
        self._metrics.preemptions.inc()
        return job

    # --- jobs -----------------------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Gives a job a row."""
        job.room = self._expect(job)
        self.active[job.number], job.has_row = job, True  # from here on, a failure ends it
        self.prefixes.request(job)

    def take_prefix(self, job: Job, room: int) -> None:
        """Takes the longest cached prefix of a job out of memory, where not all have room beside its row.

        Args:
            room: bytes beside it.
        """
        if job.caches is None and self._group is None and self._keeps(job):
            common = max((shared(job.prompt, other.prompt) for other in self.active.values()), default=0)
            job.caches = self.prefixes.take(job.prompt, common, room)

    def _started(self, job: Job, sequence: TokenSequence) -> None:
        """Reports how much of a prompt is reused, unless that was reported before the row was lost."""
        if self._settings.keeps_prompts and self._group is None:  # others may have been kept while it waited
            caches, count = self.prefixes.find(job.prompt, above=max(1, len(sequence.before)))
            continue_from(sequence, count, caches)
        job.caches = None  # the row's now
        job.evicted = max(tokens_evicted(sequence.caches or ()), default=0)  # counted with the job that cached them
        if job.started:
            return
        job.started = True
        self._metrics.queue.observe(time.monotonic() - job.since)
        if self._settings.keeps_prompts:
            job.cached = len(sequence.before)
            match = match_prefix(job.prompt, job.cached, self.prefixes.memory)
            self._monitor.prefixes.add(job, match, self._models.tokenizer.decode)
            (self._metrics.prefix_hits if job.cached else self._metrics.prefix_misses).inc()
            self._metrics.cached_tokens.inc(job.cached)
        job.on_match()

    def step(self) -> None:
        """Starts the jobs whose prompts have been looked up, makes one step, and delivers its output."""
        for job, caches, count in self.prefixes.look_up():
            if job.number in self.active:
                self._submit(job, caches, count)
        if self.engine.busy:
            self._deliver(self.engine.step())

    def _submit(self, job: Job, caches: list[Any] | None, count: int) -> None:
        """Submits a job to the engine, with caches that have read so many tokens of its prompt."""
        if job.caches is not None:
            caches, count = job.caches
        sampler = job.sampling.sampler(len(job.to_read), self._models.tokenizer)
        before, tokens = job.to_read[:count], job.to_read[count:]
        sequence = TokenSequence(job.number, tokens, job.max_tokens, self._detokenizer(job), sampler, caches, before)
        sequence.resumed = sequence.emitted = job.resumed
        sequence.room, sequence.images = job.room, job.images
        grammar = () if job.grammar is None else (job.grammar,)
        thinking = () if job.thinking is None else (job.thinking,)
        sequence.processors, sequence.top_logprobs = (*job.sampling.processors(), *grammar, *thinking), job.top_logprobs
        sequence.private, sequence.on_start = not job.keep, partial(self._started, job)
        if job.keep and self._checkpoints:
            sequence.keep = partial(self._keep_prompt, job)
        try:
            self.engine.submit(sequence)
        except ValueError as error:
            self.fail([job], str(error), 400)
            return
        if not job.started:
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
            self._monitor.count_evicted(self.decoding, self.engine.caches)
        chunks, finished = output_of(tokens, self.active)
        for chunk in chunks:
            if chunk.finish_reason is not None:
                self._finish(chunk.job, chunk.finish_reason)
                if (limit := chunk.job.thinking) is not None and limit.reached(chunk.job.answer):
                    self._metrics.thinking_limits.inc()
        if chunks:
            self._monitor.count_generated(sum(chunk.tokens for chunk in chunks))
            self._output(chunks)
            if any(len(chunk.job.answer) == chunk.tokens for chunk in chunks):
                time.sleep(5e-5)  # a first token: let the event loop send it before the next step is built
        for job, token in finished:  # after delivery
            stopped = token.finish_reason is None  # by a stop string, so that the engine would go on
            self._monitor.count_evicted([job], token.caches)
            if self._keeps(job):
                self._keep(job, self.engine.extract(job.number) if stopped else token.caches)
            if stopped:
                self.engine.answers.count(job.max_tokens, len(job.answer))
                self.engine.cancel(job.number)

    def _keeps(self, job: Job) -> bool:
        return self._settings.keeps_prompts and job.keep

    def _keep_read(self, job: Job) -> None:
        """Caches what the row of a job has read so far."""
        if self._keeps(job):
            self._keep(job, self.engine.extract(job.number) if job.caches is None else job.caches[0])

    def _keep(self, job: Job, caches: list[Any] | None) -> None:
        """Caches the tokens of a job, given evaluated copies of its row's caches."""
        if caches is None:
            return
        tokens, read = job.all_tokens, tokens_of(caches)
        if not self.engine.trim(caches, max(0, read - len(tokens))):
            return
        self.prefixes.keep(tokens[:read], caches)
        if job.checkpoint is not None:
            (count, states), job.checkpoint = job.checkpoint, None
            full = [copy.deepcopy(cache) for cache, state in zip(caches, states, strict=True) if state is None]
            later = min(read, len(tokens)) - count
            if min_tokens(full, count + later) <= count and trim_prompt_cache(full, later) == later:
                rest = iter(full)
                self.prefixes.keep(tokens[:count], [next(rest) if state is None else state for state in states])

    def _keep_prompt(self, job: Job, tokens: list[int], caches: list[Any]) -> None:
        """Caches what was read of a prompt, of which the caches at its end will not hold all.

        Where that has no room beside the row, only what those will not hold is kept until the row ends.
        """
        full = [
            is_ours(cache) and type(cache.layout) is Append and cache.evictor is None and cache.view.residual is None
            for cache in caches
        ]
        nbytes = sum(int(cache.nbytes) for cache in leaves(caches))
        if self._group is not None or not any(full) or self._fits_prefix(nbytes):
            self.prefixes.keep(tokens, caches)
        else:
            job.checkpoint = len(tokens), [None if each else cache for each, cache in zip(full, caches, strict=True)]

    def cancel(self, job: Job) -> bool:
        """Ends a job at any stage; returns whether it had a row here."""
        if job.number not in self.active:
            return False
        for jobs, caches in self.reading:
            self._monitor.count_evicted(jobs, caches)
        self._keep_read(job)  # who asks again, after a time-out, gets further
        self.engine.cancel(job.number)
        self._finish(job, "cancelled")
        return True

    def _finish(self, job: Job, reason: str) -> None:
        self.active.pop(job.number, None)
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
        if out_of_memory or self._group is not None:  # other ranks free what belongs to their engine
            self.prefixes.memory.shrink(0)
        self._restart()
        for job in self.active.values():
            job.resume()
            self.prefixes.request(job)

    def _end_one(self) -> None:
        """Ends the newest job without an answer, else the longest, since memory has run out."""
        jobs = list(self.active.values())
        unanswered = [job for job in jobs if not job.answer]
        for job in unanswered[-1:] or sorted(jobs, key=lambda job: len(job.all_tokens))[-1:]:
            self._metrics.out_of_memory.inc()
            error = "the server ran out of memory at this request: try again later, or send a shorter prompt"
            self.fail([job], error, 503)

    def _restart(self) -> None:
        del self.engine  # first: memory may not suffice for two
        mx.clear_cache()
        for attempt in range(1, ENGINE_TRIES + 1):
            try:
                self._make_engine()
                return
            except Exception as error:
                if attempt == ENGINE_TRIES or isinstance(error, RanksError):
                    raise
                log.warning("the engine could not be restarted: %s; trying again", error)
            time.sleep(ENGINE_PAUSE)

    def end(self, waiting: Iterable[Job]) -> None:
        """Ends all jobs, since the server does; a store keeps what their rows have read."""
        for job in () if self.prefixes.store is None else self.active.values():
            self._keep_read(job)
        self.fail([*self.active.values(), *waiting], SHUTTING_DOWN)

    def close(self) -> None:
        """Closes the engine, and waits until all prefixes are written."""
        self.engine.close()
        self.prefixes.close()


# --- cached prefixes --------------------------------------------------------------------------------------------------


class TieredPrefixes:
    """Cached prefixes, for one thread: in memory, and in a store, whose files another thread reads and writes.

    Args:
        store: None keeps prefixes in memory only.
        wake: called from any thread when `look_up` has something to do.
        fingerprint: identifies model and policy; `bind` uses it, if memory or store were made without one.
    """

    def __init__(
        self, memory: PromptMemory, store: PromptStore | None, wake: Callable[[], None], fingerprint: Callable[[], str]
    ) -> None:
        self.memory, self.store, self._wake = memory, store, wake
        self._fingerprint: Callable[[], str] | None = fingerprint  # until `bind`
        self._disk = ThreadPoolExecutor(1, "mlx-kv disk")
        self._requests: list[Job] = []  # whose prompts are to be looked up
        self._load: tuple[Job, Future[StoredPrompt | None]] | None = None  # what the disk reads, and for which job
        self._refreshed = -REFRESH_EVERY  # time of the last look at entries of other processes
        self._writes: list[tuple[int, Future[None]]] = []  # bytes of each entry that is yet to be written
        self._refused = False  # the last entry could not be written
        self._retry_at = 0.0  # time of the next attempt

    def bind(self) -> None:
        """Called once weights are in memory, which prefixes belong to; later calls do nothing.

        Raises:
            ValueError: memory or store keep caches of another model or policy.
        """
        if (fingerprint := self._fingerprint) is None:
            return
        self.memory.bind(fingerprint)
        if self.store is not None:
            self.store.bind(fingerprint)
            if self.store.other_versions:
                log.warning("the prompt store has %d entries of other versions: left alone", self.store.other_versions)
        self._fingerprint = None

    # --- reading ------------------------------------------------------------------------------------------------------

    def request(self, job: Job) -> None:
        """Makes a later `look_up` return the job, unless one will already."""
        if job not in self._requests and (self._load is None or self._load[0] is not job):
            self._requests.append(job)
            self._wake()

    def look_up(self) -> Iterator[tuple[Job, list[Any] | None, int]]:
        """Requested jobs, each with caches of the longest cached prefix of its prompt and its length, or None and 0.

        A job comes later if the store may have much more of its prompt than memory has, or was not looked at for a
        while: other processes may have added entries.
        """
        store = self.store
        if store is not None and self._load is not None and self._load[1].done():
            (job, load), self._load = self._load, None
            stored = load.result()
            caches = None if stored is None else self._attempt(partial(store.restore, stored))
            if stored is None or caches is None:
                yield job, *self.find(job.prompt)
            else:
                self._attempt(partial(self.memory.keep, job.to_read[: stored.count], caches))
                yield job, caches, stored.count
        requests, self._requests = self._requests, []
        for job in requests:
            if job.caches is not None:
                yield job, None, 0
                continue
            enough = self._serves(self.memory, job.prompt) + MIN_SHARED
            is_stale = time.monotonic() - self._refreshed > REFRESH_EVERY
            if store is None or len(job.to_read) <= enough:
                yield job, *self.find(job.prompt)
            elif self._load is not None:  # what is being loaded may serve this prompt, too
                self._requests.append(job)
            elif is_stale or self._serves(store, job.prompt) >= enough:
                self._refreshed = time.monotonic() if is_stale else self._refreshed
                self._load = job, self._on_disk(partial(self._fetch, store, job.prompt, enough, is_stale))
                self._load[1].add_done_callback(lambda _: self._wake())
            else:
                yield job, *self.find(job.prompt)

    def find(self, prompt: bytes, above: int = 0) -> tuple[list[Any] | None, int]:
        """Caches of the longest prefix in memory, and its length; None and 0 if it is not much longer than `above`.

        Args:
            prompt: packed tokens.
        """
        if above and self._serves(self.memory, prompt) < above + MIN_SHARED:
            return None, 0
        return self._attempt(partial(self.memory.find, prompt)) or (None, 0)

    def take(self, prompt: bytes, common: int, room: int) -> tuple[list[Any], int] | None:
        """Takes the longest prefix out of memory, as caches; None if it had better stay, or the store has more."""
        enough = self._serves(self.memory, prompt) + MIN_SHARED
        if self.store is not None and self._serves(self.store, prompt) >= enough:
            return None
        return self._attempt(partial(self.memory.take, prompt, common, room))

    def _serves(self, prefixes: PromptMemory | PromptStore, tokens: Sequence[int]) -> int:
        return self._attempt(lambda: prefixes.serves(tokens)) or 0

    # --- writing ------------------------------------------------------------------------------------------------------

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        """Caches a prefix in memory, and in the store unless that has just refused an entry."""
        first = not self.memory.too_large
        self._attempt(lambda: self.memory.keep(tokens, caches))
        if first and self.memory.too_large:
            log.warning(
                "a prompt of %s tokens does not fit into %.1f MB of prompt memory: its first %s tokens are kept, and "
                "the others are read again; raise --prompt-memory-bytes or --memory-limit (this is logged once)",
                f"{len(tokens):,}",
                self.memory.max_bytes / 1e6,
                f"{self._serves(self.memory, tokens):,}",
            )
        if self.store is not None and time.monotonic() >= self._retry_at:
            self._attempt(partial(self._store, self.store, tokens, caches))

    def _store(self, store: PromptStore, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        new = store.pack(tokens, caches)
        if new is None:
            return
        self._writes = [(nbytes, write) for nbytes, write in self._writes if not write.done()]
        if self._writes and sum(nbytes for nbytes, _ in self._writes) + new.caches.nbytes > MAX_PENDING:
            log.warning("the prompt store cannot keep up: one prompt was not stored")
            return
        self._writes.append((new.caches.nbytes, self._on_disk(partial(self._write, store, new))))

    # --- in the disk's thread -----------------------------------------------------------------------------------------

    def _fetch(self, store: PromptStore, prompt: bytes, enough: int, refresh: bool) -> StoredPrompt | None:
        if refresh:
            store.refresh()
        return store.fetch(prompt) if store.serves(prompt) >= enough else None

    def _write(self, store: PromptStore, new: PackedEntry) -> None:
        """Writes an entry. If the disk refuses it, none is written for a while, and that is logged once.

        A long prompt has an entry for each of many chunks, each of which would fail alike.
        """
        if time.monotonic() < self._retry_at:  # packed before the failure
            return
        try:
            if store.write(new) and self._refused:
                self._refused = False
                log.warning("the prompt store can be written again")
        except OSError as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if not self._refused:
                self._refused = True
                fix = ": free space, or start with fewer --prompt-store-bytes" if error.errno in FULL else ""
                log.warning(
                    "the prompt store cannot be written (%s)%s. New prompts stay in memory alone until it can",
                    error.strerror or error,
                    fix,
                )

    def _on_disk(self, task: Callable[[], T]) -> Future[T | None]:
        """Runs a task in the disk's thread; its result is None if it failed."""
        try:
            return self._disk.submit(self._attempt, task, BaseException)  # SystemExit, too: it would be lost there
        except RuntimeError as error:  # closed, or no thread could be started
            log.warning("the prompt store could not be used: %s", error)
            failed: Future[T | None] = Future()
            failed.set_result(None)
            return failed

    def _attempt(self, function: Callable[[], T], errors: type[BaseException] = Exception) -> T | None:
        """The result of a function; None, and a warning, if it fails."""
        try:
            return function()
        except RanksError:
            raise
        except errors as error:  # file systems raise errors of their own, and memory may be full
            log.warning("the prompt store could not be used: %s", " ".join(str(error).split()) or type(error).__name__)
            return None

    def close(self) -> None:
        """Waits until all is written."""
        self._disk.shutdown()
