"""The worker: one thread that owns MLX, the models and the engine. It gives rows to jobs, and makes steps."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlx_kv.cache.buffers import on_cpu
from mlx_kv.generation.sequence import FIRST_EXPECTED
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.generation.warm_up import warm_up
from mlx_kv.mlxlm.loading import context_length, vocabulary_of, weight_bytes
from mlx_kv.mlxlm.traverse import leaves
from mlx_kv.planning import USUAL_PROMPT
from mlx_kv.prefixes.memory import memory_handlers
from mlx_kv.ranks.engine import follow
from mlx_kv.ranks.group import RankGroup, TotalMemory
from mlx_kv.ranks.link import RanksError
from mlx_kv.server.memory import MemoryLimit, freed_memory, memory_limit
from mlx_kv.server.monitor import UPDATE_EVERY, Monitor
from mlx_kv.server.output import Job, OutputChunk
from mlx_kv.server.rows import Models, Rows, WorkerSettings, out_of_memory

log = logging.getLogger("mlx_kv.server")


class IdleUnload:
    """Frees weights after some time without requests; the next request loads them again.

    Args:
        seconds: without a request; None keeps the weights.
        unload: frees them.
        lazy: whether weights are freed at the start, too.
        clock: returns seconds.
    """

    def __init__(
        self,
        seconds: float | None = None,
        unload: Callable[[Models], None] = lambda models: None,
        lazy: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._unload, self._lazy, self._clock = seconds, unload, lazy, clock
        self._idle_since: float | None = None  # None while there are requests
        self._unloaded = True  # before the first request there is nothing to free, or it will be needed soon

    def begin(self, models: Models) -> None:
        """Called when the worker is ready for the first request."""
        if self._lazy:
            self._unload(models)

    def seconds_left(self) -> float | None:
        """Seconds until weights are freed; None while nothing is scheduled."""
        if self._seconds is None or self._unloaded or self._idle_since is None:
            return None
        return max(0.0, self._idle_since + self._seconds - self._clock())

    def update(self, idle: bool, models: Models) -> bool:
        """Frees weights if it is time; returns whether it did.

        Args:
            idle: whether there are no requests.
        """
        if not idle:
            self._idle_since, self._unloaded = None, False
            return False
        if self._idle_since is None:
            self._idle_since = self._clock()
        if self.seconds_left() != 0.0:
            return False
        self._unloaded = True
        try:
            self._unload(models)
        except Exception:
            log.exception("the weights could not be unloaded, and stay in memory")
            return False
        log.info("no requests for %g s: the weights are unloaded", self._seconds)
        return True


class Worker:
    """Runs jobs, up to a number at a time.

    Args:
        load: loads the models; called once, in the thread, where all arrays are made.
        group: the ranks, each of which loads a part of the model; jobs are for the worker of the first one.
        unload: frees idle weights.

    Attributes:
        deliver: called in the thread with the output of each step.
        failure: why the thread has ended, if not by `stop`.
        policy: of all caches.
        limit: of memory.
        freed_limit: bytes of freed buffers that MLX keeps; None is MLX's own limit.
        context: length in tokens; None if unknown.
        plan: memory of rows.
        prompt_bytes: of cached prefixes in memory, at most; rows that need more leave less.
        vocabulary: number of token ids.
    """

    def __init__(
        self,
        load: Callable[[], Models],
        settings: WorkerSettings | None = None,
        group: RankGroup | None = None,
        unload: IdleUnload | None = None,
    ) -> None:
        self._load, self.settings, self.group = load, settings or WorkerSettings(), group
        self._unload = unload or IdleUnload()
        self.deliver: Callable[[list[OutputChunk]], None] = lambda chunks: None
        self.monitor = Monitor()
        self.metrics = self.monitor.metrics
        self.policy, self.limit = self.settings.policy, MemoryLimit()
        self.freed_limit: int | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._crowded = False  # the rows need more than the limit, and none could be preempted
        self._blocked_at: int | None = None  # number of rows beside which no waiting job can get one
        self._stopping, self._started = False, threading.Event()
        self._load_error: Exception | None = None
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="mlx-kv worker", daemon=True)

    @property
    def memory_in_words(self) -> str:
        """What requests take, as they usually are and at worst, and how much of cached prompts memory can have."""
        count = self.settings.max_batch_size
        usual = self.plan.together([self.plan.slots(USUAL_PROMPT, FIRST_EXPECTED)] * count)
        words = f"{count} requests of {USUAL_PROMPT:,} tokens take {usual / 1e6:,.0f} MB"
        if self.context is not None:
            worst = self.plan.together([self.plan.slots(self.context, 0)] * count)
            words += f", and {worst / 1e6:,.0f} MB with the whole context of {self.context:,}"
        if self.limit.for_rows is not None:
            words += f" (there are {self.limit.for_rows / 1e6:,.0f} MB)"
        tokens = self.plan.tokens_in(self.prompt_bytes)
        size = f"{self.prompt_bytes / 1e6:,.0f} MB" + ("" if tokens is None else f", {tokens:,} tokens")
        without = "nowhere" if self.settings.open_store is None else "in the store"
        return f"{words}; prompts are kept " + (f"in at most {size}" if self.prompt_bytes else without)

    def follow(self) -> None:
        """On ranks other than the first: follows the first rank's worker until that ends. Takes no jobs.

        Raises:
            ValueError: the model does not support the settings.
            RanksError: a rank is gone.
        """
        group = self.group
        assert group is not None
        self._load_models()
        models, memory = self.models, TotalMemory(self.models.model, group)
        handlers = {**memory.handlers, **memory_handlers(group)}
        follow(partial(self.settings.engine, models, self.policy), group, handlers)

    # --- called from other threads ------------------------------------------------------------------------------

    def start(self) -> Models:
        """Starts the thread; returns the models once jobs can be submitted.

        Raises:
            Exception: loading failed.
            ValueError: the model does not support the policy.
        """
        self._thread.start()
        self._started.wait()
        if self._load_error is not None:
            self._thread.join()
            raise self._load_error
        return self.models

    def submit(self, job: Job) -> None:
        """Adds a job."""
        self._inbox.put(partial(self._add, job))

    def cancel(self, job: Job) -> None:
        """Ends a job at any stage; does nothing if it has ended."""
        self._inbox.put(partial(self._cancel, job))

    def stop(self, seconds: float | None = None) -> bool:
        """Ends the thread; unfinished jobs get an error.

        Args:
            seconds: to wait; None waits for good.

        Returns:
            Whether it has ended; if it has, all cached prefixes are in the store.
        """
        self._inbox.put(partial(setattr, self, "_stopping", True))
        self._thread.join(seconds)
        return not self.alive

    @property
    def alive(self) -> bool:
        """Whether jobs can be submitted. Once False, nothing more is delivered."""
        return self._thread.is_alive()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            lost_rank = None if self.group is None else self.group.gone_within(0.0)
            if lost_rank is None:
                log.exception("the worker has died")
            self.failure = lost_rank or " ".join(f"its worker died of {type(error).__name__}: {error}".split())[:300]
        finally:
            self._started.set()
            # MLX waits for all streams to change the limit, and holds the interpreter: with a lost rank, for good.
            if self.group is None or self.group.gone_within(0.0) is None:
                freed_memory.end(self)
            mx.clear_streams()  # a thread that ends without this makes MLX abort the process

    def _load_models(self) -> None:
        self.models: Models = self._load()
        self.policy = self.models.policy or self.policy

    def _begin(self) -> None:
        """Loads the models, and makes all that needs them."""
        self._load_models()
        models, settings = self.models, self.settings
        self._memory = TotalMemory(models.model, self.group)
        self.limit = memory_limit(settings.memory_limit, sum(map(weight_bytes, models.networks)))
        self._rows = Rows(
            models,
            settings,
            self.policy,
            self.monitor,
            partial(self._inbox.put, lambda: None),
            lambda chunks: self.deliver(chunks),
            self.limit,
            self.group,
        )
        self.plan = self._rows.plan
        self.prompt_bytes = int(self._rows.prefixes.memory.max_bytes)
        self.freed_limit = freed_memory.begin(self, self.limit.for_rows)
        self.context, self.vocabulary = context_length(models.model), vocabulary_of(models.model)
        if settings.warm_up is not None and self.group is None and not on_cpu():
            self._warm_up(settings.warm_up)
        self._unload.begin(models)

    def _warm_up(self, progress: Callable[[int, int], None]) -> None:
        """A failure leaves it to the first requests."""
        plain = replace(self.settings, drafting=DraftSettings())
        plan, limit = self.plan, self.limit

        def fits(rows: int, tokens: int) -> bool:
            return tokens <= (self.context or tokens) and limit.fits(plan.together([plan.slots(tokens, 0)] * rows))

        try:
            spare = plain.engine(replace(self.models, draft=None), self.policy)
            warm_up(self._rows.engine, spare, self.vocabulary, fits, progress)
        except Exception:
            log.exception("the warm-up failed: the first requests are slower")

    def _serve(self) -> None:
        try:
            self._begin()
        except BaseException as error:
            self._load_error = error if isinstance(error, Exception) else RuntimeError(f"loading ended with {error!r}")
            return
        self._update_monitor()
        self._started.set()
        while not self._stopping:
            try:
                self._read_inbox()
                self._preempt_rows()
                self._admit_waiting()
                kept = self._rows.prefixes.memory.nbytes
                self._rows.step()
                if self._rows.prefixes.memory.nbytes > kept:
                    self._shrink_prefixes(self._planned())
                self._update_monitor()
                continue
            except Exception as error:
                ran_out = out_of_memory(error)
                if isinstance(error, RanksError) or (self.group is not None and self.group.gone_within(1.0)):
                    raise  # without all ranks there is no model
                ending = "one row ends" if ran_out else f"all {len(self._rows.active)} rows end"
                log.exception("a step failed: %s, and the engine restarts", ending)
            self._rows.recover(ran_out)  # outside of `except`, where the traceback would hold the arrays of that step
        self._rows.end(self._waiting)
        if self.group is not None:
            self.group.finish()  # in this thread, since it owns its streams: others must not be left in a pass
        self._rows.close()

    @property
    def _may_admit(self) -> bool:
        """Whether a waiting job may get a row."""
        rows = len(self._rows.active)
        return bool(self._waiting) and rows < self.settings.max_batch_size and self._blocked_at != rows

    def _update_monitor(self) -> None:
        rows, memory = self._rows, self._rows.prefixes.memory
        idle = not self._waiting and not rows.active
        if self._unload.update(idle, self.models):
            self.monitor.expire()
        if self.monitor.due(idle):
            rows.update_progress()
            decoding, reading = ((), ()) if idle else ((rows.decoding, rows.engine.caches), rows.reading)
            planned = self._planned()
            self._shrink_prefixes(planned)
            self.monitor.update(decoding, reading, memory.nbytes, rows.engine.speculation, self._memory, planned)

    def _planned(self, candidate: Job | None = None) -> int:
        """Bytes of all rows, one that may come, and of preempted ones that keep theirs while they wait."""
        return self._rows.planned(candidate) + self._kept_bytes(candidate)

    def _kept_bytes(self, candidate: Job | None = None) -> int:
        """Bytes of the caches of jobs that wait, but for one that may come."""
        kept = [job.caches[0] for job in self._waiting if job is not candidate and job.caches is not None]
        return sum(int(cache.nbytes) for caches in kept for cache in leaves(caches))

    def _shrink_prefixes(self, planned: int) -> None:
        """Drops cached prefixes from memory that leave no room for planned rows."""
        if (left := self.limit.left(planned)) is not None:
            self._rows.prefixes.memory.shrink(left)

    def _read_inbox(self) -> None:
        """Handles messages; waits for one if there is nothing else to do."""
        try:
            if not self._rows.engine.busy and not self._may_admit:
                timeout = UPDATE_EVERY if self.monitor.rate_falls else self._unload.seconds_left()
                self._inbox.get(timeout=timeout)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _preempt_rows(self) -> None:
        """Takes rows from the newest jobs while answers that outgrew what was expected of them leave too little memory.

        The oldest keeps its row, so that each job becomes the oldest and ends; if it does not fit alone, it fails.
        """
        rows = self._rows
        if not (rows.outgrow(lambda planned: self.limit.fits(planned + self._kept_bytes())) or self._crowded):
            return
        self._crowded = False
        while not self.limit.fits(planned := self._planned()):
            if len(rows.active) == 1:
                rows.end_if_too_long(self.limit)
                break
            if (job := rows.preempt()) is None:
                self._crowded = True  # the next step tries again
                break
            self._waiting.appendleft(job)
            self._blocked_at = None
        self._shrink_prefixes(planned)

    def _admit_waiting(self) -> None:
        """Gives rows to waiting jobs in their order, as far as there is room."""
        if not self._may_admit:
            return
        rows = self._rows
        while self._waiting and len(rows.active) < self.settings.max_batch_size:
            planned = self._planned(self._waiting[0])
            if rows.active and not self.limit.fits(planned):
                break
            self._shrink_prefixes(planned)
            rows.add(self._waiting.popleft())
        self._blocked_at = len(rows.active)  # until a row ends, or a job comes or goes

    def _add(self, job: Job) -> None:
        self._waiting.append(job)
        self._blocked_at = None

    def _cancel(self, job: Job) -> None:
        self._blocked_at = None
        if job in self._waiting:
            self._waiting.remove(job)
            self.metrics.finished.labels("cancelled").inc()
        elif not self._rows.cancel(job):
            return
        self.monitor.expire()
