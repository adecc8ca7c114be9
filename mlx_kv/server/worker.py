"""The one thread that owns MLX, the models and the engine.

Decides when a request gets a row, when one is let go, and what ends the thread. Requests come through a queue; what
becomes of them is handed back in batches, one for each step. Knows nothing about HTTP, JSON or asyncio, nor what is
done with a row (`policy_rows`) and shown of its memory (`monitor`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Literal, TypeVar

import mlx.core as mx

from mlx_kv.files.fingerprint import model_fingerprint
from mlx_kv.generation.speculation.settings import DraftSettings
from mlx_kv.generation.two_pass_prefill import Instructions
from mlx_kv.mlxlm.loading import context_length, vocabulary_of
from mlx_kv.policy import CachePolicy
from mlx_kv.prefixes.memory import PromptMemory
from mlx_kv.prefixes.rank_shards import RankShards, ShardFollower
from mlx_kv.prefixes.store import PromptStore
from mlx_kv.ranks.following import Caches, follow
from mlx_kv.ranks.group import RankGroup
from mlx_kv.ranks.link import RanksError
from mlx_kv.ranks.totals import MemoryOfAll
from mlx_kv.server.errors import SHUTTING_DOWN
from mlx_kv.server.history import TokenHistory
from mlx_kv.server.job import Job, OutputChunk, Snapshot
from mlx_kv.server.kept_prompts import KeptPrompts
from mlx_kv.server.memory_plan import MemoryLimit, RowPlan, limited
from mlx_kv.server.metrics import Metrics
from mlx_kv.server.models import EngineSettings, Models
from mlx_kv.server.monitor import UPDATE_EVERY, Monitor
from mlx_kv.server.policies import RowsByPolicy, policy_name
from mlx_kv.server.policy_rows import PolicyRows, Served, out_of_memory
from mlx_kv.server.rest import Rest
from mlx_kv.server.tiered_prefixes import TieredPrefixes

log = logging.getLogger("mlx_kv.server")
T = TypeVar("T")
PASSED_BY = 5.0  # seconds since its request in which others pass one for which there is no engine


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
        memory_limit: bytes of weights, keys and values of rows, and prompts that are kept; "device" is what the device
            can bear, None is no limit.
        most_policies: cache policies for which there is an engine at once.
        most_wait: seconds that rows wait for their next token while prompts are read, as in `make_engine`.
        rest: when weights leave memory; None is never.
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
        memory_limit: int | Literal["device"] | None = None,
        most_policies: int = 1,
        most_wait: float | None = None,
        rest: Rest | None = None,
    ) -> None:
        self._group = group
        self._load, self.deliver, self._metrics = load, deliver, metrics
        self.policy, self.max_batch_size = policy or CachePolicy(), max_batch_size
        self._drafting, self._prefill_step_size = drafting or DraftSettings(), prefill_step_size
        self._prompt_memory_bytes, self._open_store = prompt_memory_bytes, open_store
        self._memory_limit, self._most_policies, self._rest = memory_limit, most_policies, rest or Rest()
        self.limit, self._most_wait = MemoryLimit(), most_wait
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._monitor = Monitor(metrics)
        self._too_large: tuple[Job, int] | None = None  # who has found no room, beside how many
        self._stuck_beside: int | None = None  # how many have a row, beside whom nobody who waits has found room
        self._told_policies: list[tuple[str, int]] = []
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
        memory, for_caches = MemoryOfAll(self.models.model, group), group.for_caches(self.models.model)
        whose = f"{model_fingerprint(self.models.model)} {self.policy}"
        instructions = Instructions.for_policy(self.policy, self.models.tokenizer, self.models.model)

        def more(caches: Caches) -> dict[str, Callable[..., object]]:
            return {**memory.handlers, **ShardFollower(group, for_caches, lambda: whose, caches).handlers}

        follow(partial(self._settings.engine, self.models, self.policy, instructions), group, more)

    def _load_models(self) -> None:
        self.models: Models = self._load()
        self.policy = self.models.policy or self.policy
        if self._group is not None:  # the rank that keeps least decides what all keep
            (self._prompt_memory_bytes,) = self._group.all_min([self._prompt_memory_bytes])

    @property
    def _settings(self) -> EngineSettings:
        step, wait = self._prefill_step_size, self._most_wait
        return EngineSettings(self.max_batch_size, step, self._drafting, self.keeps_prompts, wait)

    def parts(self) -> RankShards | None:
        """Of prompts that are kept, those that the other ranks have; None where there is no other."""
        if self._group is None:
            return None
        for_caches = self._group.for_caches(self.models.model)
        return RankShards(self._group, for_caches, lambda: self._rows.engine.numbers, self._inbox.put)  # type: ignore[attr-defined]

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

    def plan(self, policy: CachePolicy | None = None) -> Future[RowPlan]:
        """What rows of a policy take; None is the policy of the server. A ValueError says what is refused.

        Nobody answers once `alive` is False.
        """
        return self.ask(lambda: self._policies.plan(self.policy if policy is None else policy))

    def submit(self, job: Job) -> None:
        job.policy = job.policy or self.policy
        self._inbox.put(partial(self._waiting.append, job))

    def cancel(self, job: Job) -> None:
        """Lets a job go, wherever it stands; one that has ended is no error."""
        self._inbox.put(partial(self._cancel, job))

    def ask(self, what: Callable[[], T]) -> Future[T]:
        """Does something in the thread, between two steps; its future has what it returns or raises."""
        asked: Future[T] = Future()
        self._inbox.put(partial(_do, what, asked))
        return asked

    @property
    def prefixes(self) -> TieredPrefixes:
        """What was read of prompts; only for what is asked of the thread."""
        return self._rows.prefixes

    @property
    def ranks(self) -> int:
        """How many machines have a part of the model."""
        return 1 if self._group is None else self._group.size

    @property
    def speculates(self) -> bool:
        """Whether tokens are drafted."""
        return self._drafting.drafter is not None or self.models.draft is not None

    @property
    def snapshot(self) -> Snapshot:
        """What was in memory a moment ago."""
        return self._monitor.snapshot

    @property
    def history(self) -> TokenHistory:
        """How many tokens came when."""
        return self._monitor.history

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
    def rows_by_policy(self) -> list[tuple[str, int]]:
        """Each policy that has an engine now, in words, and how many rows it has."""
        return self._told_policies

    @property
    def keeps_prompts(self) -> bool:
        """Whether what was read of prompts is kept for others."""
        return self._open_store is not None or self._prompt_memory_bytes > 0

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
            served = Served(
                self.models,
                self._settings,
                self._metrics,
                self._monitor,
                lambda chunks: self.deliver(chunks),
                self._group,
            )
            self._kept = KeptPrompts(self._prompt_memory_bytes, self._open_prefixes)
            self._policies = RowsByPolicy(served, self.policy, self._kept, self._most_policies)
            self._rows = self._policies.main
            self._rows.begin()
            self.own_plan = self._policies.plan(self.policy)
            self.limit = limited(self._memory_limit, self.models)
            self.context, self.vocabulary = context_length(self.models.model), vocabulary_of(self.models.model)
            self._rest.begin(self.models)
        except BaseException as error:
            self._load_error = error if isinstance(error, Exception) else RuntimeError(f"loading ended with {error!r}")
            return
        self._update_monitor()
        self._started.set()
        while not self._stopping:
            at_fault: list[PolicyRows] = list(self._policies)  # whose rows end if something fails now
            try:
                self._read_inbox()
                self._admit_waiting()
                for rows in self._policies:
                    at_fault = [rows]
                    rows.step()
                at_fault = list(self._policies)
                self._update_monitor()
                continue
            except Exception as error:
                ran_out = out_of_memory(error)
                if isinstance(error, RanksError) or (self._group is not None and self._group.gone_within(1.0)):
                    raise  # there is nobody to go on with
                count = sum(len(rows.active) for rows in at_fault)
                what = "one row ends" if ran_out else f"all {count} rows end"
                log.exception("a step failed: %s, and the engine is made anew", what)
            for rows in at_fault:
                rows.recover(ran_out)  # out here, where no traceback holds the arrays of that step any longer
        self._rows.fail([*self._policies.active, *self._waiting], SHUTTING_DOWN)
        if self._group is not None:
            self._group.finish()  # here, since streams are a thread's own: others must not be left in a pass
        self._policies.close()

    def _open_prefixes(self, whose: Callable[[], str]) -> TieredPrefixes:
        memory = PromptMemory(self._prompt_memory_bytes, parts=self.parts())
        try:
            store = None if self._open_store is None else self._open_store(self.models)
        except Exception as error:
            if not self._started.is_set():
                raise  # who starts a server hears of it
            log.warning("the prompt store cannot be opened for another policy, whose prompts stay in memory: %s", error)
            store = None
        return TieredPrefixes(memory, store, self._inbox.put, whose)

    @property
    def _room(self) -> bool:
        """Whether one more job can have a row."""
        return self._at_once < self.max_batch_size

    @property
    def _at_once(self) -> int:
        """How many jobs have a row."""
        return sum(len(rows.active) for rows in self._policies)

    def _update_monitor(self) -> None:
        policies = self._policies
        idle = not self._waiting and not any(rows.active for rows in policies)
        if idle:
            self._rows.tell_dropped()
        if self._rest.look(idle, self.models):
            self._monitor.expire()
        if self._monitor.due(idle):
            for rows in policies:
                rows.note_progress()
            self._told_policies = [(policy_name(rows.policy), len(rows.active)) for rows in policies]
            batches = [] if idle else [(rows.decoding, rows.engine.caches) for rows in policies]
            drafts = [rows.engine.speculation for rows in policies if rows.engine.speculation is not None]
            self._kept.fit(self.limit.left(policies.planned()))
            self._monitor.update(batches, self._kept.nbytes, drafts, self._memory, policies.planned())

    def _read_inbox(self) -> None:
        """Does what was asked for; waits for it where there is nothing else to do."""
        try:
            if self._policies.waits and not (self._waiting and self._room and self._stuck_beside != self._at_once):
                self._inbox.get(timeout=UPDATE_EVERY if self._monitor.rate_falls else self._rest.wait())()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _admit_waiting(self) -> None:
        """Gives rows to those who wait, in their order, as far as there is room.

        Those whose policy has no engine are passed by others for a while, so that engines are at work until one can be
        let go.
        """
        if not self._waiting or not self._room:
            return
        for job in list(self._waiting):
            if not self._room or not self._admit(job):
                break
        self._stuck_beside = self._at_once if self._waiting else None

    def _admit(self, job: Job) -> bool:
        """Gives a job a row, if there is one; says whether others may have one."""
        policies, policy, standing = self._policies, job.policy or self.policy, (job, self._at_once)
        if self._too_large == standing or (self._at_once and not self.limit.fits(policies.planned(job))):
            self._too_large = standing  # until a row has ended
            return False
        try:
            rows = policies.of(policy)
        except Exception as error:  # of an engine that is begun for it alone: others have no part in that
            refused = isinstance(error, ValueError)
            if not refused and self._group is not None:
                raise  # other ranks may have begun one
            if not refused:
                log.exception("no engine could be made for %s: one request ends", policy_name(policy))
            self._waiting.remove(job)
            why = str(error) if refused else f"no engine could be made for this cache: {type(error).__name__}: {error}"
            self._rows.fail([job], why, 400 if refused else 503)
            return True
        if rows is None:
            return time.monotonic() - job.since < PASSED_BY
        self._kept.fit(self.limit.left(policies.planned(job)))
        self._waiting.remove(job)
        rows.add(job)
        return True

    def _cancel(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            self._metrics.finished.labels("cancelled").inc()
        elif not any(rows.cancel(job) for rows in self._policies):
            return
        self._monitor.expire()


def _do(what: Callable[[], T], asked: Future[T]) -> None:
    if asked.set_running_or_notify_cancel():
        try:
            asked.set_result(what())
        except Exception as error:
            asked.set_exception(error)
