"""The worker: one thread that owns MLX, the models and their engines. It gives rows to jobs, and makes steps.

All models share one memory limit. Weights are read piece by piece between the steps of other models, and freed, the
least recently used first, where others need the memory and nothing of them runs.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import numpy as np

from mlx_kv.cache.buffers import on_cpu
from mlx_kv.generation.embedding import Pooling
from mlx_kv.generation.sequence import FIRST_EXPECTED
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.generation.warm_up import warm_up
from mlx_kv.mlxlm.traverse import leaves
from mlx_kv.planning import USUAL_PROMPT
from mlx_kv.policy import CachePolicy
from mlx_kv.prefixes.memory import memory_handlers
from mlx_kv.ranks.engine import follow
from mlx_kv.ranks.group import RankGroup, TotalMemory
from mlx_kv.ranks.link import RanksError
from mlx_kv.server.json_http import SHUTTING_DOWN, ApiError
from mlx_kv.server.memory import MemoryLimit, freed_memory, memory_limit
from mlx_kv.server.monitor import UPDATE_EVERY, Monitor
from mlx_kv.server.output import Job, OutputChunk
from mlx_kv.server.rows import Rows, out_of_memory
from mlx_kv.server.served import Served, Weights, bytes_held, sharing

LONGEST_SLEEP = 3_600.0  # seconds; timers may have any
PIECE, LARGE_PIECE = 2**25, 2**28  # bytes of weights read between two steps: beside rows of other models, and without
T = TypeVar("T")
Vectors = list[np.ndarray[Any, np.dtype[np.float32]]]
log = logging.getLogger("mlx_kv.server")


class EmbeddingJob(NamedTuple):
    """Texts to be embedded by a model, with the passes of the embedder, and what waits for their vectors."""

    served: Served
    passes: Generator[None, None, list[mx.array]]
    vectors: Future[Vectors]

    def end(self, result: Vectors | Exception) -> None:
        """Gives the result to who waits for it, if anybody does."""
        if self.vectors.set_running_or_notify_cancel():
            if isinstance(result, Exception):
                self.vectors.set_exception(result)
            else:
                self.vectors.set_result(result)


class Worker:
    """Runs jobs, up to a number at a time.

    Args:
        served: the models; the settings of the first one are the server's. They are loaded in the thread, where all
            arrays are made.
        group: the ranks, each of which loads a part of the only model; jobs are for the worker of the first one.

    Attributes:
        default: the first model.
        deliver: called in the thread with the output of each step.
        failure: why the thread has ended, if not by `stop`.
        limit: of memory, with the weights that are in it now.
        freed_limit: bytes of freed buffers that MLX keeps; None is MLX's own limit.
        prompt_bytes: of cached prefixes in memory, at most; rows that need more leave less.
    """

    def __init__(self, served: Sequence[Served], group: RankGroup | None = None) -> None:
        self.served, self.default, self.group = list(served), served[0], group
        self.settings = self.default.settings
        self.deliver: Callable[[list[OutputChunk]], None] = lambda chunks: None
        self.monitor = Monitor()
        self.metrics = self.monitor.metrics
        self.limit = MemoryLimit()
        self.freed_limit: int | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._embedding: deque[EmbeddingJob] = deque()
        self._wanted = False  # texts to be embedded wait for memory, and no job gets a row until they have it
        self._crowded = False  # the rows need more than the limit, and none could be preempted
        self._blocked_at: object = None  # what holds memory, beside which no waiting job can get a row
        self._stopping, self._started = False, threading.Event()
        self._load_error: Exception | None = None
        self._current = self.default  # whose rows are being worked on
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="mlx-kv worker", daemon=True)

    @property
    def policies(self) -> list[CachePolicy]:
        """Of the models, each once."""
        policies: list[CachePolicy] = []
        for served in self.served:
            policies += [] if served.policy in policies else [served.policy]
        return policies

    @property
    def memory_in_words(self) -> str:
        """What requests take, as they usually are and at worst, and how much of cached prompts memory can have."""
        count, plan, context = self.settings.max_batch_size, self.default.plan, self.default.context
        usual = plan.together([plan.slots(USUAL_PROMPT, FIRST_EXPECTED)] * count)
        words = f"{count} requests of {USUAL_PROMPT:,} tokens take {usual / 1e6:,.0f} MB"
        if context is not None:
            worst = plan.together([plan.slots(context, 0)] * count)
            words += f", and {worst / 1e6:,.0f} MB with the whole context of {context:,}"
        if (for_rows := self.limit_of(self.default).for_rows) is not None:
            words += f" (there are {for_rows / 1e6:,.0f} MB)"
        tokens = plan.tokens_in(self.prompt_bytes)
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
        self.default.load({})
        memory = TotalMemory(self.default.models.model, group)
        handlers = {**memory.handlers, **memory_handlers(group)}
        follow(partial(self.settings.engine, self.default.models, self.default.policy), group, handlers)

    # --- called from other threads ------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread; returns once jobs can be submitted.

        Raises:
            Exception: loading failed.
            ValueError: the model does not support the policy.
        """
        self._thread.start()
        self._started.wait()
        if self._load_error is not None:
            self._thread.join()
            raise self._load_error

    def submit(self, job: Job) -> None:
        """Adds a job."""
        self._inbox.put(partial(self._add, job))

    def cancel(self, job: Job) -> None:
        """Ends a job at any stage; does nothing if it has ended."""
        self._inbox.put(partial(self._cancel, job))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function in the thread."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)

        self._inbox.put(run)
        return future

    def embed(self, served: Served, texts: Sequence[Sequence[int]], pooling: Pooling | None = None) -> Future[Vectors]:
        """Embeds texts, given as token ids, between steps: one vector for each.

        The future raises ApiError if the model has no embeddings, its weights cannot be read now, or the server ends.
        """
        vectors: Future[Vectors] = Future()
        passes = served.embed(texts, pooling, lambda: served.embedding_tokens(bool(self._active)))
        self._inbox.put(partial(self._embedding.append, EmbeddingJob(served, passes, vectors)))
        return vectors

    def load(self, served: Served) -> str | None:
        """Begins to read the weights of a model, if they are not in memory. In the thread.

        Returns:
            Why they cannot be read now; None if they can.
        """
        self._blocked_at = None
        if not self._make_room(served):
            return self.shortage(served)
        served.used = time.monotonic()
        served.idle.restart()
        return None

    def keep_alive(self, served: Served, seconds: float | None) -> None:
        """As `Served.keep_alive`; several machines keep their weights."""
        if self.group is None:
            served.keep_alive(seconds)

    def unload(self, served: Served) -> str | None:
        """Frees the weights of a model, unless another one needs them. In the thread.

        Returns:
            Why they cannot be freed now; None if they are.
        """
        if self.group is not None or served.fixed:
            why = "is pinned" if served.fixed else "is on several machines, which keep their weights"
            return f"{served.names.name} {why}: it stays in memory"
        if self._needed(served):
            return f"{served.names.name} is answering: try again when it has ended"
        self._free_all(served)
        self.monitor.expire()
        return None

    def limit_of(self, served: Served) -> MemoryLimit:
        """The limit for rows of one model, when no other has weights in memory but for pinned ones."""
        pinned = [each for each in self.served if each.fixed or (each.pinned and each.state != "unloaded")]
        weights = {each for one in (served, *pinned) for each in one.weights}
        return replace(self.limit, weights=sum(each.nbytes for each in weights))

    def shortage(self, served: Served) -> str:
        """What holds the memory that a model needs."""
        held = {each.names.name: each for each in self.served if each is not served and each.state != "unloaded"}
        words = [
            f"{name} ({each.nbytes / 1e6:,.0f} MB{', pinned' if each.pinned else ''}"
            f"{f', {len(each.rows.active)} requests' if each.rows.active else ''})"
            for name, each in held.items()
        ]
        limit = f"{(self.limit.limit or 0) / 1e6:,.0f} MB"
        return (
            f"the weights of {served.names.name} take {served.nbytes / 1e6:,.0f} MB of {limit}, and these models hold "
            f"memory: {', '.join(words) or 'none'}"
        )

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
            for embedding in self._embedding:
                embedding.end(ApiError(503, self.failure or SHUTTING_DOWN))
            # MLX waits for all streams to change the limit, and holds the interpreter: with a lost rank, for good.
            if self.group is None or self.group.gone_within(0.0) is None:
                freed_memory.end(self)
            mx.clear_streams()  # a thread that ends without this makes MLX abort the process

    def _begin(self) -> None:
        """Loads the models, and makes all that needs them."""
        known: dict[int, Weights] = {}
        for served in self.served:
            served.load(known)
        settings, models = self.settings, self.default.models
        self._memory = TotalMemory(models.model, self.group)
        held = bytes_held(self.served)
        limit = memory_limit(settings.memory_limit, max(held, *(each.nbytes for each in self.served))).limit
        self.limit = MemoryLimit(limit, held)
        for served in self.served:
            served.open(self._make_rows)
        for served in self.served:
            if served.pinned and self.load(served) is None:
                while served.state == "loading":
                    self._read_weights()
        self._bind()
        self.prompt_bytes = int(self.default.rows.prefixes.memory.max_bytes)
        self.freed_limit = freed_memory.begin(self, self.limit_of(self.default).for_rows)
        if settings.warm_up is not None and self.group is None and not on_cpu() and self.default.state == "loaded":
            self._warm_up(settings.warm_up)

    def _make_rows(self, served: Served) -> Rows:
        return Rows(
            served.models,
            served.settings,
            served.policy,
            self.monitor,
            partial(self._inbox.put, lambda: None),
            lambda chunks: self.deliver(chunks),
            replace(self.limit, weights=served.nbytes),
            self.group,
            lambda nbytes: self.limit.fits(self._planned() + nbytes),
        )

    def _bind(self) -> None:
        """Tells cached prefixes the weights that they are of, once those are in memory."""
        for served in self.served:
            if served.state == "loaded":
                served.rows.prefixes.bind()

    def _warm_up(self, progress: Callable[[int, int], None]) -> None:
        """A failure leaves it to the first requests."""
        plain = replace(self.settings, drafting=DraftSettings())
        default, plan, limit = self.default, self.default.plan, self.limit

        def fits(rows: int, tokens: int) -> bool:
            return tokens <= (default.context or tokens) and limit.fits(plan.together([plan.slots(tokens, 0)] * rows))

        try:
            spare = plain.engine(replace(default.models, draft=None), default.policy)
            warm_up(default.rows.engine, spare, default.vocabulary, fits, progress)
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
            self._current = self.default
            try:
                self._read_inbox()
                self._preempt_rows()
                self._admit_waiting()
                self._read_weights()
                kept = self._kept_prompts
                active = len(self._active) + bool(self._embedding)
                for served in self.served:
                    self._current = served
                    if self.group is None:
                        served.rows.engine.take_turns(max(1, active))
                    served.rows.step()
                if self._kept_prompts > kept:
                    self._shrink_prefixes(self._planned())
                self._embed()
                self._update_monitor()
                continue
            except Exception as error:
                ran_out = out_of_memory(error)
                if isinstance(error, RanksError) or (self.group is not None and self.group.gone_within(1.0)):
                    raise  # without all ranks there is no model
                ending = "one row ends" if ran_out else f"all {len(self._current.rows.active)} rows end"
                log.exception("a step failed: %s, and the engine restarts", ending)
            # Outside of `except`, where the traceback would hold the arrays of that step.
            self._current.rows.recover(ran_out)
        for served in self.served:
            served.rows.end([job for job in self._waiting if job.served is served])
        if self.group is not None:
            self.group.finish()  # in this thread, since it owns its streams: others must not be left in a pass
        for served in self.served:
            served.rows.close()

    # --- memory: weights, rows and cached prefixes of all models ------------------------------------------------------

    @property
    def _active(self) -> list[Served]:
        """The models that have rows."""
        return [served for served in self.served if served.rows.active]

    @property
    def _at_work(self) -> bool:
        """Whether something is being done, after which there may be more memory."""
        return bool(self._active) or self._reading or any(each.served.state == "loaded" for each in self._embedding)

    @property
    def _kept_prompts(self) -> int:
        """Bytes of cached prefixes in memory."""
        return sum(served.rows.prefixes.memory.nbytes for served in self.served)

    @property
    def _holders(self) -> tuple[object, ...]:
        """What may keep a waiting job from a row."""
        return tuple((len(served.rows.active), served.state) for served in self.served)

    def _planned(self, candidate: Job | None = None) -> int:
        """Bytes of all rows, one that may come, and of preempted ones that keep theirs while they wait."""
        rows = (
            served.rows.planned(candidate if candidate is not None and candidate.served is served else None)
            for served in self.served
        )
        return sum(rows) + self._kept_bytes(candidate)

    def _kept_bytes(self, candidate: Job | None = None) -> int:
        """Bytes of the caches of jobs that wait, but for one that may come."""
        kept = [job.caches[0] for job in self._waiting if job is not candidate and job.caches is not None]
        return sum(int(cache.nbytes) for caches in kept for cache in leaves(caches))

    def _shrink_prefixes(self, planned: int) -> None:
        """Drops cached prefixes from memory that leave no room for planned rows, of the least recently used models."""
        if (left := self.limit.left(planned)) is None:
            return
        excess = self._kept_prompts - left
        for served in sorted(self.served, key=lambda served: served.used):
            if excess <= 0:
                break
            memory = served.rows.prefixes.memory
            before = memory.nbytes
            memory.shrink(max(0, before - excess))
            excess -= before - memory.nbytes

    def _make_room(self, served: Served, job: Job | None = None) -> bool:
        """Makes room for the weights of a model, which begin to be read, and for the row of a job, if there is."""
        planned, missing = self._planned(job), [each for each in served.weights if not each.held]
        more = sum(each.nbytes for each in missing)
        while not self.limit.fits(planned + more):
            if not self._free_unused(served):
                if self._at_work or (missing and not self.limit.fits(more)):
                    return False
                break
        left = self.limit.left(planned + more)
        if job is not None and left is not None and left < self._kept_prompts and served.state == "loaded":
            served.rows.take_prefix(job, left)
            planned = self._planned(job)
        self._shrink_prefixes(planned + more)
        for weights in missing:
            weights.begin()
        self._count_weights()
        return True

    def _count_weights(self) -> None:
        if self.limit.weights != (held := bytes_held(self.served)):
            self.limit, self._blocked_at = replace(self.limit, weights=held), None
            self.monitor.expire()

    # --- weights ------------------------------------------------------------------------------------------------------

    @property
    def _reading(self) -> bool:
        """Whether weights are being read."""
        return any(weights.being_read for served in self.served for weights in served.weights)

    def _read_weights(self) -> None:
        """Reads a piece of the weights that are to be in memory."""
        piece = PIECE if self._active else LARGE_PIECE
        for served in self.served:
            if not any(weights.being_read for weights in served.weights):
                continue
            try:
                for weights in served.weights:
                    weights.read(piece)
                self._bind()
            except Exception as error:
                log.exception("the weights of %s could not be read", served.names.name)
                self._free_all(served)
                reason = f"the model could not be loaded: {error}"
                served.rows.fail(self._take(served), reason, 503)
                for embedding in [each for each in self._embedding if each.served is served]:
                    self._embedding.remove(embedding)
                    embedding.end(ApiError(503, reason, "model"))
            if served.state == "loaded":
                self._blocked_at = None
                self.metrics.model_loads.labels(served.names.name).inc()
                log.info("the weights of %s are in memory", served.names.name)
                self.monitor.expire()
            return

    def _free_unused(self, needed: Served | None = None) -> bool:
        """Frees the weights that were not used for longest, of models without rows; returns whether there are any.

        Args:
            needed: a model that keeps its own.
        """
        free: list[tuple[float, Weights]] = []
        for weights in {each for served in self.served for each in served.weights if each.loaded}:
            users = sharing(self.served, weights)
            if not any(each is needed or each.pinned or each.rows.active or self._embeds(each) for each in users):
                free.append((max(each.used for each in users), weights))
        return bool(free) and self._free(min(free, key=lambda pair: pair[0])[1])

    def _free_all(self, served: Served) -> None:
        """Frees the weights of a model that no other one uses."""
        for weights in served.weights:
            users = [each for each in sharing(self.served, weights) if each is not served]
            if weights.held and not any(each.pinned or self._needed(each) for each in users):
                self._free(weights)

    def _free(self, weights: Weights) -> bool:
        """Frees weights; returns whether that was possible."""
        try:
            weights.free()
        except Exception:
            log.exception("the weights could not be unloaded, and stay in memory")
            return False
        self._count_weights()
        return True

    def _free_idle(self) -> None:
        """Frees the weights of models that had no requests for as long as they are to be kept."""
        for served in self.served:
            busy = self._needed(served)
            if busy:
                served.used = time.monotonic()
            if served.idle.update(not busy) and not served.pinned and served.state != "unloaded":
                self._free_all(served)
                if served.state == "unloaded":
                    log.info("no requests for %g s: the weights are unloaded", served.idle.seconds)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    @property
    def _may_admit(self) -> bool:
        """Whether a waiting job may get a row."""
        return bool(self._waiting) and self._blocked_at != self._holders

    def _embeds(self, served: Served) -> bool:
        """Whether texts are being embedded by a model, or will be next."""
        return bool(self._embedding) and self._next_embedding.served is served

    @property
    def _next_embedding(self) -> EmbeddingJob:
        """The first texts of a loaded model, or the first of all."""
        loaded = (each for each in self._embedding if each.served.state == "loaded")
        return next(loaded, self._embedding[0])

    def _needed(self, served: Served) -> bool:
        """Whether there are requests to a model."""
        waiting = [job.served for job in self._waiting] + [job.served for job in self._embedding]
        return bool(served.rows.active) or served in waiting

    def _take(self, served: Served) -> list[Job]:
        """The waiting jobs of a model, which wait no longer."""
        jobs = [job for job in self._waiting if job.served is served]
        for job in jobs:
            self._waiting.remove(job)
        return jobs

    def _embed(self) -> None:
        """Makes one pass over texts to be embedded, or makes room for the weights of their model."""
        self._wanted = False
        if not self._embedding:
            return
        job = self._next_embedding
        result: Vectors | Exception | None = None
        try:
            if job.vectors.cancelled():
                result = []
            elif job.served.state == "loaded":
                next(job.passes)
            elif not self._make_room(job.served):
                self._wanted = self._at_work
                if not self._wanted:
                    result = ApiError(503, self.shortage(job.served), "model", None, {"Retry-After": "5"})
        except StopIteration as ended:
            result = [np.array(vector) for vector in ended.value]
        except ValueError as error:
            result = ApiError(400, str(error), "model")
        except Exception as error:
            log.exception("texts could not be embedded")
            result = ApiError(500, f"the texts could not be embedded: {type(error).__name__}")
        if result is not None:
            self._embedding.remove(job)
            job.passes.close()
            job.end(result)

    def _update_monitor(self) -> None:
        idle = not self._waiting and not self._active
        self._free_idle()
        if self.monitor.due(idle):
            decoding, reading = [], []
            for served in self._active:
                self._current, rows = served, served.rows
                rows.update_progress()
                decoding.append((rows.decoding, rows.engine.caches))
                reading += rows.reading
            drafts = [served.rows.engine.speculation for served in self.served]
            planned = self._planned()
            self._shrink_prefixes(planned)
            self.monitor.update(decoding, reading, self._kept_prompts, drafts, self._memory, planned)

    def _read_inbox(self) -> None:
        """Handles messages; waits for one if there is nothing else to do."""
        busy = self._reading or self._embedding or any(served.rows.engine.busy for served in self.served)
        try:
            if not busy and not self._may_admit:
                timers = [left for served in self.served if (left := served.idle.seconds_left()) is not None]
                timeout = UPDATE_EVERY if self.monitor.rate_falls else min(timers, default=None)
                self._inbox.get(timeout=None if timeout is None else min(timeout, LONGEST_SLEEP))()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _preempt_rows(self) -> None:
        """Takes rows from the newest jobs while answers that outgrew what was expected of them leave too little memory.

        The oldest keeps its row, so that each job becomes the oldest and ends; if it does not fit alone, it fails.
        """

        def fits_beside(served: Served, planned: int) -> bool:
            others = sum(each.rows.planned() for each in self._active if each is not served)
            return self.limit.fits(planned + others + self._kept_bytes())

        grown = []
        for served in self._active:
            self._current = served
            grown.append(served.rows.outgrow(partial(fits_beside, served)))
        if not (any(grown) or self._crowded):
            return
        self._crowded = False
        while not self.limit.fits(self._planned()):
            if self._free_unused():
                continue
            self._current = newest = max(self._active, key=lambda served: max(served.rows.active))
            if sum(len(served.rows.active) for served in self._active) == 1:
                if self._reading:  # of weights that will be free to go
                    self._crowded = True
                else:
                    newest.rows.end_if_too_long(self.limit_of(newest))
                break
            if (job := newest.rows.preempt()) is None:
                self._crowded = True  # the next step tries again
                break
            self._waiting.appendleft(job)
            self._blocked_at = None
        self._shrink_prefixes(self._planned())

    def _admit_waiting(self) -> None:
        """Gives rows to waiting jobs in their order, as far as there is room.

        One that waits for a row of its model, or for its weights, does not keep jobs of others from theirs; one that
        waits for memory does, so that it gets it.
        """
        if not self._may_admit or self._wanted:
            return
        full = set[Served]()
        for job in list(self._waiting):
            served = job.served
            if served in full or len(served.rows.active) >= served.settings.max_batch_size:
                continue
            if not self._make_room(served, job):
                if self._at_work:
                    break
                served.rows.fail(self._take(served), self.shortage(served), 503)
            elif served.state == "loaded":
                self._waiting.remove(job)
                self._current = served
                served.rows.add(job)
            else:
                full.add(served)
        self._blocked_at = self._holders  # until a row ends, weights have come or gone, or a job comes or goes

    def _add(self, job: Job) -> None:
        job.served = job.served or self.default
        self._waiting.append(job)
        self._blocked_at = None

    def _cancel(self, job: Job) -> None:
        self._blocked_at = None
        if job in self._waiting:
            self._waiting.remove(job)
            self.metrics.finished.labels("cancelled").inc()
        else:
            self._current = job.served
            if not job.served.rows.cancel(job):
                return
        self.monitor.expire()
