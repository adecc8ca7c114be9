"""What the worker lets others see: a snapshot of memory now and then, tokens per second, and how many were evicted.

Decides how often the caches are looked at, and over which time a rate is told. Knows nothing about which rows there
should be. All but `watch` is called in the thread that owns the caches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from mlx_kv.generation.speculation.statistics import SpeculationStatistics
from mlx_kv.ranks.totals import MemoryOfAll
from mlx_kv.server.history import TokenHistory
from mlx_kv.server.job import Job, Snapshot
from mlx_kv.server.metrics import Metrics
from mlx_kv.server.occupancy import BatchOccupancy, occupancy_of, tokens_evicted

ALONE = MemoryOfAll()
BYTES = ("bytes_live", "bytes_allocated", "bytes_full")
UPDATE_EVERY = 0.25  # seconds between two snapshots
WATCHED_FOR = 3.0  # seconds for which a page that asked counts as watching
RATE_OVER = 10.0  # seconds over which tokens per second are told
Batch = tuple[Sequence[Job], Sequence[Any]]  # the jobs that are rows of caches, in their order, and these


class Monitor:
    """Counts, and keeps the newest snapshot."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._updated, self._watched = 0.0, -WATCHED_FOR
        self._generated: deque[tuple[float, int]] = deque()  # when, and how many tokens
        # Of each engine that drafts: what it has drafted, and how much of that was counted.
        self._drafted: list[tuple[SpeculationStatistics, SpeculationStatistics]] = []
        self.snapshot, self.history = Snapshot(), TokenHistory(time.monotonic())

    def watch(self) -> Snapshot:
        """What is in memory. For some seconds from now, positions of rows are looked at, too."""
        self._watched = time.monotonic()
        return self.snapshot

    @property
    def rate_falls(self) -> bool:
        """Whether nothing but time makes tokens per second go back to 0: that must be told, too."""
        return bool(self._generated)

    def count_generated(self, tokens: int) -> None:
        self._metrics.generated_tokens.inc(tokens)
        now = time.monotonic()
        self._generated.append((now, tokens))
        self.history.add(now, tokens)

    def count_evicted(self, jobs: Iterable[Job], caches: Sequence[Any] | None) -> None:
        """Counts what budgets have evicted of these jobs, the rows of caches, since they were last counted."""
        if caches is None:
            return
        for job, tokens in zip(jobs, tokens_evicted(caches), strict=False):
            self._metrics.evicted.inc(max(0, tokens - job.evicted))
            job.evicted = max(tokens, job.evicted)

    def expire(self) -> None:
        """What is shown is no longer so: the next update is due."""
        self._updated = 0.0

    def due(self, idle: bool) -> bool:
        """Whether it is time for a snapshot; it is, at once, when the last row has ended."""
        return time.monotonic() - self._updated >= UPDATE_EVERY or (idle and bool(self.snapshot.decoding))

    def update(
        self,
        batches: Iterable[Batch],
        prompt_memory: int,
        speculation: Sequence[SpeculationStatistics] = (),
        ranks: MemoryOfAll = ALONE,
        planned: int = 0,
    ) -> None:
        """Makes a snapshot.

        Args:
            batches: of each engine whose rows decode.
            prompt_memory: bytes of prompts that are kept; of several ranks, on the one that has most.
            speculation: of each engine that drafts; the first is shown.
            ranks: who have parts of the model, and of all that is kept.
            planned: bytes that rows will take at the most.
        """
        self._updated = now = time.monotonic()
        while self._generated and now - self._generated[0][0] > RATE_OVER:
            self._generated.popleft()
        rate = 0.0
        if self._generated:
            rate = sum(tokens for _, tokens in self._generated) / max(1.0, now - self._generated[0][0])
        decoding: list[Job] = []
        occupancy = BatchOccupancy()
        for jobs, caches in batches:
            if caches:
                decoding += jobs
                occupancy = occupancy.beside(occupancy_of(caches, now - self._watched < WATCHED_FOR))
        of_all: dict[str, Any] = {name: ranks.of_all(getattr(occupancy, name)) for name in BYTES}
        generated = tuple(len(job.answer) for job in decoding)
        self._count_drafted(speculation)
        self.snapshot = Snapshot(
            replace(occupancy, **of_all),
            tuple(decoding),
            generated,
            rate,
            ranks.active(),
            prompt_memory,
            self._drafted[0][1] if self._drafted else None,
            planned,
        )

    def _count_drafted(self, speculation: Iterable[SpeculationStatistics]) -> None:
        """Counts what is new: it goes on in the thread of the engines."""
        known, self._drafted = self._drafted, []
        for own in speculation:
            now = replace(own, caches=[])
            counted = next((before for other, before in known if other is own), SpeculationStatistics())
            self._metrics.drafted.inc(now.drafted - counted.drafted)
            self._metrics.accepted.inc(now.accepted - counted.accepted)
            self._metrics.draft_passes.inc(now.rounds - counted.rounds)
            self._drafted.append((own, now))
