"""The one thread that owns MLX, the models and the engine.

Decides when a request gets a row, when one is let go, and what becomes of the others when a step fails. Requests come
through a queue; what becomes of them is handed back in batches, one for each step. Knows nothing about HTTP, JSON or
asyncio, nor what is shown of its memory (`monitor`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.files.fingerprint import model_fingerprint
from mlx_kv.generation.agreement import Agreement
from mlx_kv.generation.engine import Engine, make_engine
from mlx_kv.generation.rereading import Instructions
from mlx_kv.generation.sequence import BatchToken, TokenSequence
from mlx_kv.generation.speculation.settings import DraftSettings
from mlx_kv.mlxlm.loading import context_length
from mlx_kv.policy import CachePolicy
from mlx_kv.prefixes.memory import PromptMemory
from mlx_kv.prefixes.part_keeper import PartKeeper
from mlx_kv.prefixes.parts import RankParts
from mlx_kv.prefixes.reader import PromptReader
from mlx_kv.prefixes.store import PromptStore
from mlx_kv.ranks.engine import LedEngine, lead
from mlx_kv.ranks.following import Caches, follow
from mlx_kv.ranks.group import RankGroup
from mlx_kv.ranks.link import RanksError
from mlx_kv.ranks.totals import MemoryOfAll
from mlx_kv.server.fingerprint import serving_fingerprint
from mlx_kv.server.job import Job, OutputChunk, Snapshot, sampler_for
from mlx_kv.server.metrics import Metrics
from mlx_kv.server.monitor import UPDATE_EVERY, Monitor
from mlx_kv.server.prefill import PrefillScheduler
from mlx_kv.server.tiered_prefixes import TieredPrefixes

ENGINE_TRIES, ENGINE_PAUSE = 3, 0.5  # how often an engine is made anew before the worker gives up; seconds in between
log = logging.getLogger("mlx_kv.server")


@dataclass(frozen=True)
class Models:
    """What the worker loads: a model, its tokenizer, and a draft model to speculate with."""

    model: nn.Module
    tokenizer: Any
    draft: nn.Module | None = None


class Worker:
    """Continues jobs, at most so many at once.

    Args:
        load: called once, in the thread, so that all arrays are made there.
        deliver: called in the thread with the output of each step.
        policy, max_batch_size, prefill_step_size: as in `make_engine`.
        drafting: what is drafted; None is nothing, or by the draft model if there is one.
        prompt_memory_bytes: of processed prompts that are kept in memory; 0 keeps none.
        open_store: makes the store behind them, if there is to be one.
        group: the ranks of which each loads a part of the model; the worker of the first one has the jobs.
    """

    def __init__(
        self,
        load: Callable[[], Models],
        deliver: Callable[[list[OutputChunk]], None],
        metrics: Metrics,
        policy: CachePolicy | None = None,
        max_batch_size: int = 8,
        drafting: DraftSettings | None = None,
        prefill_step_size: int | None = None,
        prompt_memory_bytes: int = 2**30,
        open_store: Callable[[Models], PromptStore] | None = None,
        group: RankGroup | None = None,
    ) -> None:
        self._group = group
        self._load, self.deliver, self._metrics = load, deliver, metrics
        self.policy, self.max_batch_size = policy or CachePolicy(), max_batch_size
        self._drafting, self._prefill_step_size = drafting or DraftSettings(), prefill_step_size
        self._prompt_memory_bytes, self._open_store = prompt_memory_bytes, open_store
        self._keeps = open_store is not None or prompt_memory_bytes > 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._active: dict[int, Job] = {}  # by number: those that the engine has
        self._monitor = Monitor(metrics, evicts=self.policy.budget is not None)
        self._stopping, self._started = False, threading.Event()
        self._load_error: Exception | None = None  # what loading raised
        self.failure: str | None = None  # why the thread has ended, if nobody asked it to
        self._thread = threading.Thread(target=self._run, name="mlx-kv worker", daemon=True)

    def follow(self) -> None:
        """On another rank than the first: does as the worker there, until that ends. This one takes no jobs.

        Raises:
            ValueError: what loading the models, or making an engine, refuses.
            RanksError: a rank is gone.
        """
        group = self._group
        assert group is not None, "who is alone follows nobody"
        self._load_models()
        memory, peers = MemoryOfAll(self.models.model, group), group.agreement.peers(self.models.model)
        whose = f"{model_fingerprint(self.models.model)} {self.policy}"

        def more(caches: Caches) -> dict[str, Callable[..., object]]:
            return {**memory.handlers, **PartKeeper(group, peers, lambda: whose, caches).handlers}

        follow(self._engine_for, group, more)

    def _load_models(self) -> None:
        self.models: Models = self._load()
        self._agree_on_limits()
        self._asked = Instructions.for_policy(self.policy, self.models.tokenizer, self.models.model)

    def parts(self) -> RankParts | None:
        """Of prompts that are kept, those that the other ranks have; None where there is no other."""
        if self._group is None:
            return None
        peers = self._group.agreement.peers(self.models.model)
        return RankParts(self._group, peers, lambda: self._engine.numbers, self._inbox.put)  # type: ignore[attr-defined]

    # --- called from other threads ------------------------------------------------------------------------------

    def start(self) -> Models:
        """Loads the models; returns them when jobs can be submitted.

        Raises:
            Exception: whatever loading them raised, or the ValueError with which `make_engine` refuses a policy.
        """
        self._thread.start()
        self._started.wait()
        if self._load_error is not None:
            self._thread.join()
            raise self._load_error
        return self.models

    def submit(self, job: Job) -> None:
        self._inbox.put(partial(self._waiting.append, job))

    def cancel(self, job: Job) -> None:
        """Lets a job go, wherever it stands; one that has ended is no error."""
        self._inbox.put(partial(self._cancel, job))

    @property
    def snapshot(self) -> Snapshot:
        """What was in memory a moment ago."""
        return self._monitor.snapshot

    def watch(self) -> Snapshot:
        """The same. For some seconds from now, positions of rows are looked at, too."""
        return self._monitor.watch()

    def stop(self, seconds: float | None = None) -> bool:
        """Ends the thread; jobs that are left get an error.

        Args:
            seconds: to wait for that; None waits for ever.

        Returns:
            Whether it has ended.
        """
        self._inbox.put(partial(setattr, self, "_stopping", True))
        self._thread.join(seconds)
        return not self.alive

    @property
    def alive(self) -> bool:
        """Whether jobs can be submitted. Once False, nothing more is delivered: whoever waits must look for himself."""
        return self._thread.is_alive()

    @property
    def keeps_prompts(self) -> bool:
        """Whether what was read of prompts is kept for others."""
        return self._keeps

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            gone = None if self._group is None else self._group.gone_within(0.0)
            if gone is None:
                log.exception("the worker has died")
            self.failure = gone or " ".join(f"its worker died of {type(error).__name__}: {error}".split())[:300]
        finally:
            self._started.set()
            mx.clear_streams()  # MLX wants this of a thread that ends, or it ends the process with an abort

    def _serve(self) -> None:
        try:
            self._load_models()
            self._memory = MemoryOfAll(self.models.model, self._group)
            self._make_engine()
            self._prompt_memory = PromptMemory(self._prompt_memory_bytes, parts=self.parts())
            store = None if self._open_store is None else self._open_store(self.models)
            self._prefixes = TieredPrefixes(self._prompt_memory, store, self._inbox.put, self._fingerprint)
            self.context, self.vocabulary = context_length(self.models.model), len(self.models.tokenizer)
            self._make_prefill()
        except BaseException as error:
            self._load_error = error if isinstance(error, Exception) else RuntimeError(f"loading ended with {error!r}")
            return
        self._started.set()
        while not self._stopping:
            try:
                self._read_inbox()
                self._admit_waiting()
                if self._engine.busy:
                    self._deliver(self._engine.step())
                self._update_monitor()
                continue
            except Exception as error:
                if isinstance(error, RanksError) or (self._group is not None and self._group.gone_within(1.0)):
                    raise  # there is nobody to go on with
                log.exception("a step failed: all %d rows end, and the engine is made anew", len(self._active))
            self._recover()  # out here, where no traceback holds the arrays of that step any longer
        self._fail([*self._active.values(), *self._waiting], "the server is shutting down")
        if self._group is not None:
            self._group.finish()  # here, since streams are a thread's own: others must not be left in a pass
        self._engine.close()
        self._prefixes.close()

    def _agree_on_limits(self) -> None:
        """The rank that keeps least decides what all keep."""
        if self._group is not None:
            (self._prompt_memory_bytes,) = self._group.agreement.least([self._prompt_memory_bytes])
            self._keeps = self._open_store is not None or self._prompt_memory_bytes > 0

    def _fingerprint(self) -> str:
        """What tells the caches of this model, draft model and policy from those of others."""
        models = self.models
        return serving_fingerprint(models.model, models.draft, self.policy, self._drafting, self._engine)

    def _make_engine(self) -> None:
        self._engine = lead(self._engine_for, self._group)

    def _engine_for(self, agreement: Agreement) -> Engine:
        return make_engine(
            self.models.model,
            set(self.models.tokenizer.eos_token_ids),
            self.policy,
            self.max_batch_size,
            self._prefill_step_size,
            self.models.draft,
            **vars(self._drafting),
            return_caches=self._keeps or self.policy.budget is not None,  # also to see what was evicted last
            agreement=agreement,
            instructions=self._asked,
        )

    def _make_prefill(self) -> None:
        self._prefill = PrefillScheduler(
            self._engine,
            self._prefixes,
            self._prefill_step_size,
            instructions=self._asked,
            reading=lambda: [self._active[number] for number in self._engine.pending],
            decoding=lambda: self._decoding,
        )

    @property
    def _decoding(self) -> list[Job]:
        """The jobs that decode, in the order of the rows of the engine's caches."""
        return [self._active[number] for number in self._engine.rows]

    def _update_monitor(self) -> None:
        idle = not self._active and not self._waiting
        if idle and isinstance(self._engine, LedEngine):
            self._engine.numbers.tell_dropped()  # it may be long until anything else is told
        if self._monitor.due(idle):
            rows, caches = ([], []) if idle else (self._decoding, self._engine.caches)
            self._monitor.update(rows, caches, self._prompt_memory.nbytes, self._engine.speculation, self._memory)

    def _read_inbox(self) -> None:
        """Does what was asked for; waits for it where there is nothing else to do."""
        try:
            room = self._waiting and len(self._active) < self.max_batch_size
            if not self._engine.busy and self._prefill.waits and not room:
                self._inbox.get(timeout=UPDATE_EVERY if self._monitor.rate_falls else None)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _admit_waiting(self) -> None:
        while self._waiting and len(self._active) < self.max_batch_size:
            job = self._waiting.popleft()
            self._active[job.number], job.joined = job, True  # from here on, whatever fails ends it
            if self._keeps:
                self._prefill.add(job)
            else:
                self._submit(job)
        for job, reader in self._prefill.step():
            job.cached = reader.reused
            (self._metrics.prefix_hits if reader.reused else self._metrics.prefix_misses).inc()
            self._metrics.cached_tokens.inc(job.cached)
            self._monitor.count_evicted([job], reader.caches)
            self._submit(job, reader)

    def _submit(self, job: Job, reader: PromptReader | None = None) -> None:
        """Gives a job to the engine, with caches if any of its prompt has been read."""
        sampler, detokenizer = sampler_for(job), self.models.tokenizer.detokenizer
        read, caches = (0, None) if reader is None else (reader.read, reader.caches)
        before, rest = job.tokens[:read], job.tokens[read:]
        try:
            self._engine.submit(TokenSequence(job.number, rest, job.max_tokens, detokenizer, sampler, caches, before))
        except ValueError as error:
            self._fail([job], str(error))
            return
        self._metrics.prompt_tokens.inc(len(job.tokens))

    def _deliver(self, tokens: list[BatchToken]) -> None:
        """Passes on what a step gave."""
        if self.policy.budget is not None:
            self._monitor.count_evicted(self._decoding, self._engine.caches)
        chunks: dict[int, OutputChunk] = {}
        ended: list[tuple[Job, BatchToken]] = []
        for token in tokens:
            job = self._active.get(token.index)
            if job is None:
                continue  # it met a stop string earlier in this step
            job.answer.append(token.token)
            text, finish = job.stop_strings.feed(token.text), token.finish_reason
            if job.stop_strings.stopped:
                finish = "stop"
            elif finish is not None:
                text += job.stop_strings.finish()
            chunk = OutputChunk(job, text, 1, finish)
            chunks[job.number] = chunks[job.number].joined(chunk) if job.number in chunks else chunk
            if finish is not None:
                self._finish(job, finish)
                ended.append((job, token))
        if chunks:
            self._monitor.count_generated(sum(chunk.tokens for chunk in chunks.values()))
            self.deliver(list(chunks.values()))
            if any(len(chunk.job.answer) == chunk.tokens for chunk in chunks.values()):
                time.sleep(5e-5)  # a first token is waited for: let it out before the next step is built
        for job, token in ended:  # when the clients know
            stopped = token.finish_reason is None  # by a text: the engine would go on
            self._monitor.count_evicted([job], token.caches)
            if self._keeps:
                self._prefill.keep(job, self._engine.extract(job.number) if stopped else token.caches)
            if stopped:
                self._engine.cancel(job.number)

    def _finish(self, job: Job, reason: str) -> None:
        self._active.pop(job.number, None)
        self._prefill.wake()
        self._metrics.finished.labels(reason).inc()

    def _cancel(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        elif job.number in self._active:
            reader = self._prefill.remove(job)
            self._monitor.count_evicted([job], None if reader is None else reader.caches)
            self._engine.cancel(job.number)
        else:
            return
        self._finish(job, "cancelled")
        self._monitor.expire()

    def _fail(self, jobs: list[Job], error: str) -> None:
        for job in jobs:
            self._finish(job, "error")
        if jobs:
            self.deliver([OutputChunk(job, finish_reason="error", error=error) for job in jobs])

    def _recover(self) -> None:
        """A step has failed: its rows are lost, but not the server.

        Raises:
            Exception: the engine cannot be made anew; there is nothing more to be done then.
        """
        self._metrics.engine_failures.inc()
        self._fail(list(self._active.values()), "the server failed while it generated: see its log")
        del self._engine, self._prefill  # and with them what may be too much for two
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
