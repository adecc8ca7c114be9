"""Prompts on their way to a row: what was read before is found, what cannot be found later is read in small steps.

Decides where a prompt goes on from: from memory, from the disk, or from a row that still decodes. Caches that cannot be
trimmed back to any prefix are read here, a chunk between two steps of the engine, prompts in turn, and kept on the way;
the others go to the engine at once, which reads many prompts together. Knows nothing about queues, text or how a row
ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from mlx_kv.generation.engine import Engine
from mlx_kv.generation.two_pass_prefill import NO_INSTRUCTIONS, Instructions
from mlx_kv.mlxlm.traverse import attention_caches
from mlx_kv.prefixes.index import MIN_SHARED, packed, shared
from mlx_kv.prefixes.prefix_cache import needs_checkpoints
from mlx_kv.prefixes.reader import PromptReader
from mlx_kv.server.job import Job
from mlx_kv.server.occupancy import tokens_evicted
from mlx_kv.server.tiered_prefixes import FoundOnly, TieredPrefixes

WORTH_WAITING = 256  # tokens that need not be read if all of another prompt, which has them too, is read first


class PrefillScheduler:
    """Jobs whose prompt is not with the engine yet.

    Args:
        step: tokens read at once; None is what the engine reads.
        reading, decoding: the jobs that the engine has, on their way to a row, and in one.
        instructions: before the second reading of a prompt, where caches want one.
    """

    def __init__(
        self,
        engine: Engine,
        prefixes: TieredPrefixes,
        step: int | None,
        reading: Callable[[], Iterable[Job]],
        decoding: Callable[[], Iterable[Job]],
        instructions: Instructions = NO_INSTRUCTIONS,
    ) -> None:
        self._engine, self._prefixes = engine, prefixes
        self._step = engine.step_size if step is None else step
        self._in_engine, self._decoding, self._instructions = reading, decoding, instructions
        self._jobs: list[Job] = []  # whose turn it is comes first
        self._readers: dict[Job, PromptReader] = {}  # of those that are read here
        self._waits: dict[Job, float] = {}  # since when, for the disk
        self._fetching: Job | None = None
        self._fetched: Job | None = None
        self._stalled = False
        self._checkpoints = needs_checkpoints(engine.make_caches())

    def add(self, job: Job) -> None:
        self._jobs.append(job)
        self._stalled = False

    def remove(self, job: Job) -> PromptReader | None:
        """Returns how far it was read here, if at all; it need not be there."""
        if job in self._jobs:
            self._jobs.remove(job)
        self._waits.pop(job, None)
        return self._readers.pop(job, None)

    def wake(self) -> None:
        """A job has ended: another may have waited for it."""
        self._stalled = False

    def __contains__(self, job: object) -> bool:
        return job in self._jobs

    @property
    def read(self) -> dict[Job, int]:
        """Tokens that were read of prompts on their way."""
        return {job: reader.read for job, reader in self._readers.items()}

    @property
    def waits(self) -> bool:
        """Whether `step` has nothing to do, until the disk has answered or the engine has done something."""
        return not self._jobs or self._stalled

    def step(self) -> list[tuple[Job, PromptReader]]:
        """Some work: one chunk at the most. Returns jobs that are ready for the engine, and how far they are read."""
        ready: list[tuple[Job, PromptReader]] = []
        for job in list(self._jobs):
            reader = self._readers.get(job) or self._begin(job, [other for other, _ in ready])
            if reader is None:
                continue
            self._jobs.remove(job)
            if self._checkpoints:
                self._readers[job] = reader
                reader.step()
                if not reader.done:
                    self._jobs.append(job)
                    return []
                del self._readers[job]
                return [(job, reader)]
            ready.append((job, reader))
        self._stalled = not ready
        return ready

    def _begin(self, job: Job, ready: list[Job]) -> PromptReader | None:
        """A reader that stands where reading goes on; None if that cannot be said yet."""
        if self._fetched is not job and self._has_patience(job) and self._prefixes.on_disk(job.prompt):
            waits_since = self._waits.setdefault(job, time.monotonic())
            if self._fetching is None:  # else perhaps that comes with what this one needs
                self._fetching = job
                left = self._prefixes.patience - (time.monotonic() - waits_since)
                self._prefixes.fetch(job.to_read, self._arrived, left)
            return None
        self._waits.pop(job, None)
        if self._fetched is not job:
            there, wanted = self._prefixes.serves(job.prompt), job.prompt
            if self._worth_waiting(wanted, there, ready):
                return None
            if not self._checkpoints:
                self._take_from_rows(wanted, there)
        caches = self._engine.make_caches()
        kept = self._prefixes if job.keep else FoundOnly(self._prefixes)
        reader = PromptReader(self._engine.read, caches, job.to_read, kept, self._step, self._instructions)
        job.evicted = max(tokens_evicted(reader.caches), default=0)  # by others, who have counted it
        return reader

    def _has_patience(self, job: Job) -> bool:
        """Whether a job has not waited for the disk, its turn included, as long as any may."""
        return job not in self._waits or time.monotonic() - self._waits[job] < self._prefixes.patience

    def _worth_waiting(self, wanted: bytes, there: int, ready: list[Job]) -> bool:
        """Whether another prompt will soon have been read as far as it has this one's tokens, and that is much."""
        for other, reader in self._readers.items():
            same = shared(other.prompt, wanted) if other.keep else 0
            if same >= there + MIN_SHARED and reader.read < same:  # it reads what would else be read twice
                return True
        for other in () if self._checkpoints else (*self._in_engine(), *ready):
            # A row to take it from is there when all of the other prompt is read.
            gain = shared(other.prompt, wanted) - there
            if other.keep and gain >= max(WORTH_WAITING, (len(other.to_read) - other.cached) // 2):
                return True
        return False

    def _arrived(self) -> None:
        self._fetching, self._fetched, self._stalled = None, self._fetching, False

    def _take_from_rows(self, wanted: bytes, there: int) -> None:
        """Keeps a copy of the row that has most of a prompt, if it has much more than memory, and much at all."""
        decoding = [job for job in self._decoding() if job.keep]
        rows = [(shared(job.prompt + packed(job.answer[job.resumed :]), wanted), job.number, job) for job in decoding]
        most, _, job = max(rows, default=(0, 0, None))
        if job is not None and most >= there + max(MIN_SHARED, len(job.known) // 8):
            self.keep(job, self._engine.extract(job.number))

    def keep(self, job: Job, caches: list[Any] | None) -> None:
        """Keeps what was read of a job, by evaluated copies of its row's caches."""
        if caches is None:
            return
        known, read = job.known, max((int(cache.offset) for cache in attention_caches(caches)), default=0)
        beyond = max(0, read - len(known))
        if self._engine.trim(caches, beyond):
            self._prefixes.keep(known[:read], caches)
