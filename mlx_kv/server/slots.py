"""Slots as llama-server has them: places for rows, each with what it read last.

Decides which slot a request is shown in: the one that it asked for, else the one that has most of its prompt, else the
one that was used least recently. A slot holds tokens alone: what was read of them is kept with all other prompts
(`tiered_prefixes`), and found by any request. Knows nothing about files or caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from mlx_kv.prefixes.index import MIN_SHARED, packed, shared
from mlx_kv.server.job import Job


@dataclass
class Slot:
    """One of them.

    Attributes:
        number: from 0 up.
        job: that it decodes or reads; None where it is free.
        tokens: of the last prompt and its answer.
        text: the same as bytes, to be compared.
        used: when it last got a job, as an order.
    """

    number: int
    job: Job | None = None
    tokens: list[int] = field(default_factory=list)
    text: bytes = b""
    used: int = 0

    def has(self, tokens: Sequence[int]) -> None:
        """From now on these are its tokens."""
        self.tokens, self.text = list(tokens), packed(tokens)


class Slots:
    """Those of a server.

    Args:
        most: rows at once.
    """

    def __init__(self, most: int) -> None:
        self.all = [Slot(number) for number in range(most)]
        self._order = count(1)

    def look(self, jobs: Iterable[Job]) -> None:
        """Shows those jobs in a slot that have a row by now."""
        shown = {slot.job for slot in self.all}
        for job in jobs:
            if job.joined and job not in shown:
                self._take(job)

    def leave(self, job: Job) -> None:
        """A job has ended, also one that nobody has looked at."""
        self.look([job])
        for slot in self.all:
            if slot.job is job:
                slot.job = None
                slot.has(job.known)

    def restored(self, number: int, tokens: Sequence[int]) -> None:
        """What a slot had was read from a file."""
        slot = self.all[number]
        slot.has(tokens)
        slot.used = next(self._order)

    def _take(self, job: Job) -> None:
        free = [slot for slot in self.all if slot.job is None]
        if not free:
            return  # one that has ended has not been told yet
        slot = next((slot for slot in free if slot.number == job.slot), None) or _fitting(free, job)
        slot.job, slot.used = job, next(self._order)


def _fitting(free: Sequence[Slot], job: Job) -> Slot:
    """The slot that has most of a prompt, or where that is nearly nothing, the one that was used least recently."""
    most, _, like = max((shared(slot.text, job.prompt), slot.number, slot) for slot in free)
    return like if most >= MIN_SHARED else min(free, key=lambda slot: slot.used)
