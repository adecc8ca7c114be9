"""Prompts before their row decodes: cached prefixes are found, and prompts that need checkpoints are read in chunks.

A prompt continues from memory, from the store, or from a row that still decodes. Caches that can't be trimmed to any
prefix are read here, one chunk between two steps of the engine, with prompts in turn and checkpoints cached on the way.
Other prompts go to the engine at once, which reads many together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlx_kv.generation.engine import Engine
from mlx_kv.generation.two_pass_prefill import NO_INSTRUCTIONS, Instructions
from mlx_kv.mlxlm.traverse import attention_caches
from mlx_kv.prefixes.index import MIN_SHARED, packed, shared
from mlx_kv.prefixes.reader import PromptReader, needs_checkpoints
from mlx_kv.server.job import Job
from mlx_kv.server.memory import tokens_evicted
from mlx_kv.server.tiered_prefixes import ReadOnlyPrefixes, TieredPrefixes

WORTH_WAITING = 256  # tokens saved by waiting until another prompt that shares them has been read


class PrefillScheduler:
    """Jobs of which the engine does not have the prompt yet.

    Args:
        step_size: prompt tokens per chunk; None is the engine's.
        instructions: for a two-pass prefill.
        matched: called when the cached prefix of a job has been looked up, with the number of tokens found.
    """

    def __init__(
        self,
        engine: Engine,
        prefixes: TieredPrefixes,
        step_size: int | None,
        instructions: Instructions = NO_INSTRUCTIONS,
        matched: Callable[[Job, int], None] = lambda job, reused: None,
    ) -> None:
        self._matched = matched
        self._engine, self._prefixes, self._instructions = engine, prefixes, instructions
        self._step_size = engine.step_size if step_size is None else step_size
        self.jobs: list[Job] = []  # in turn
        self._readers: dict[Job, PromptReader] = {}  # of prompts that are read here
        self._fetching: Job | None = None
        self._fetched: Job | None = None
        self._stalled = False
        self._checkpoints = needs_checkpoints(engine.make_caches())

    def add(self, job: Job) -> None:
        """Adds a job."""
        self.jobs.append(job)
        self._stalled = False

    def remove(self, job: Job) -> PromptReader | None:
        """Removes a job, if present; returns its reader, if its prompt was read here."""
        if job in self.jobs:
            self.jobs.remove(job)
        return self._readers.pop(job, None)

    def wake(self) -> None:
        """Called when a job has ended: others may have waited for it."""
        self._stalled = False

    @property
    def read(self) -> dict[Job, int]:
        """Tokens read of each prompt that is read here."""
        return {job: reader.read for job, reader in self._readers.items()}

    @property
    def caches(self) -> list[tuple[list[Job], list[Any]]]:
        """Each job whose prompt is read here, with the caches of its row."""
        return [([job], reader.caches) for job, reader in self._readers.items()]

    @property
    def waits(self) -> bool:
        """Whether `step` has nothing to do until the store has answered or the engine has made a step."""
        return not self.jobs or self._stalled

    def step(self, pending: Sequence[Job], decoding: Sequence[Job]) -> list[tuple[Job, PromptReader]]:
        """Reads at most one chunk. Returns jobs that are ready for the engine, with their readers.

        Args:
            pending: jobs of which the engine reads the prompt, or will.
            decoding: jobs that decode.
        """
        ready: list[tuple[Job, PromptReader]] = []
        for job in list(self.jobs):
            others = [*pending, *(other for other, _ in ready)]
            reader = self._readers.get(job) or self._begin(job, others, decoding)
            if reader is None:
                continue
            self.jobs.remove(job)
            if self._checkpoints:
                self._readers[job] = reader
                reader.step()
                if not reader.done:
                    self.jobs.append(job)
                    return []
                del self._readers[job]
                return [(job, reader)]
            ready.append((job, reader))
        self._stalled = not ready
        return ready

    def _begin(self, job: Job, pending: Sequence[Job], decoding: Sequence[Job]) -> PromptReader | None:
        """A reader that starts after the longest cached prefix; None if the job has to wait for that."""
        if self._fetched is not job and self._prefixes.on_disk(job.prompt):
            if self._fetching is None:  # else that fetch may bring what this job needs
                self._fetching = job
                self._prefixes.fetch(job.to_read, self._fetch_ended)
            return None
        if self._fetched is not job:
            cached = self._prefixes.serves(job.prompt)
            if self._worth_waiting(job.prompt, cached, pending):
                return None
            if not self._checkpoints:
                self._keep_row_like(job.prompt, cached, decoding)
        prefixes = self._prefixes if job.keep else ReadOnlyPrefixes(self._prefixes)
        caches = self._engine.make_caches()
        reader = PromptReader(self._engine.read, caches, job.to_read, prefixes, self._step_size, self._instructions)
        self._matched(job, reader.reused)
        job.evicted = max(tokens_evicted(reader.caches), default=0)  # counted with the job that cached them
        return reader

    def _worth_waiting(self, prompt: bytes, cached: int, pending: Sequence[Job]) -> bool:
        """Whether another prompt, soon to be read, shares many more tokens with this one than are cached."""
        for other, reader in self._readers.items():
            common = shared(other.prompt, prompt) if other.keep else 0
            if common >= cached + MIN_SHARED and reader.read < common:
                return True
        for other in () if self._checkpoints else pending:
            # Its caches can be copied once all of its prompt is read.
            gain = shared(other.prompt, prompt) - cached
            if other.keep and gain >= max(WORTH_WAITING, (len(other.to_read) - other.cached) // 2):
                return True
        return False

    def _fetch_ended(self) -> None:
        self._fetching, self._fetched, self._stalled = None, self._fetching, False

    def _keep_row_like(self, prompt: bytes, cached: int, decoding: Sequence[Job]) -> None:
        """Caches a copy of the decoding row that shares most of a prompt, if that is much more than is cached."""
        rows = [
            (shared(job.prompt + packed(job.answer[job.resumed :]), prompt), job.number, job)
            for job in decoding
            if job.keep
        ]
        common, _, job = max(rows, default=(0, 0, None))
        if job is not None and common >= cached + max(MIN_SHARED, len(job.known) // 8):
            self.keep(job, self._engine.extract(job.number))

    def keep(self, job: Job, caches: list[Any] | None) -> None:
        """Caches the tokens of a job, given evaluated copies of its row's caches."""
        if caches is None:
            return
        known, read = job.known, max((int(cache.offset) for cache in attention_caches(caches)), default=0)
        beyond = max(0, read - len(known))
        if self._engine.trim(caches, beyond):
            self._prefixes.keep(known[:read], caches)
