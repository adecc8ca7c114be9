"""How many tokens came when: of the last minutes in full, and since the start ever coarser.

Decides how much is remembered, which is always the same small number of counts. Knows nothing about where tokens come
from. One thread counts, others may read.
"""

from __future__ import annotations

from typing import Any

SLOTS = 240
RECENT_SECONDS, RECENT_SLOTS = 1, 120


class SinceStart:
    """Counts since the start, in slots of equal length: where there would be too many, each two become one.

    Attributes:
        seconds: of a slot.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots, self.seconds = slots, 1
        self._counts = [0]

    def add(self, since_start: float, count: int) -> None:
        """Counts at a time, in seconds, not before any that was counted."""
        while since_start >= self._slots * self.seconds:
            pairs = self._counts + [0] * (len(self._counts) % 2)
            self._counts = [pairs[i] + pairs[i + 1] for i in range(0, len(pairs), 2)]
            self.seconds *= 2
        slot = int(since_start // self.seconds)
        self._counts += [0] * (slot + 1 - len(self._counts))
        self._counts[slot] += count

    def counts(self, since_start: float) -> list[int]:
        """Of all slots up to a time; the last is not over yet."""
        counts = list(self._counts)
        return counts + [0] * (min(self._slots, int(since_start // self.seconds) + 1) - len(counts))


class Recent:
    """Counts of the newest slots."""

    def __init__(self, slots: int = RECENT_SLOTS, seconds: int = RECENT_SECONDS) -> None:
        self._slots, self.seconds = slots, seconds
        self._counts: dict[int, int] = {}  # by the number of the slot, those of which there is any

    def add(self, since_start: float, count: int) -> None:
        """Counts at a time, in seconds."""
        slot = int(since_start // self.seconds)
        self._counts = {old: value for old, value in self._counts.items() if old > slot - self._slots}
        self._counts[slot] = self._counts.get(slot, 0) + count

    def counts(self, since_start: float) -> list[int]:
        """Of the newest slots up to a time; the last is not over yet, and before the start there are none."""
        last, counts = int(since_start // self.seconds), self._counts
        return [counts.get(slot, 0) for slot in range(max(0, last + 1 - self._slots), last + 1)]


class TokenHistory:
    """Tokens that were generated, by time.

    Args:
        started: by the clock that tells the other times.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._scales: dict[str, Recent | SinceStart] = {"recent": Recent(), "since_start": SinceStart()}

    def add(self, now: float, tokens: int) -> None:
        for scale in self._scales.values():
            scale.add(now - self._started, tokens)

    def figures(self, now: float) -> dict[str, Any]:
        """Of each scale, the seconds of a slot and the tokens of all of them, oldest first."""
        since = now - self._started
        return {name: {"seconds": scale.seconds, "tokens": scale.counts(since)} for name, scale in self._scales.items()}
