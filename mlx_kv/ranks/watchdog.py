"""Steps that never end: a collective in which one rank waits for another for good.

Decides how long a step may take: a given time, or so many times as long as the longest before it. Knows nothing about
what a step is; whoever takes one says when it begins and ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

STEP_SECONDS = 120.0  # that any step may take: the first ones read weights, and compile
FACTOR = 20.0
LOOKED = 0.25  # of the time that a step may take, between two looks at it


class Watchdog:
    """Calls `late` with a reason when a step takes far longer than any before it.

    Args:
        seconds: that any step may take.
    """

    def __init__(self, late: Callable[[str], None], seconds: float = STEP_SECONDS) -> None:
        self._late, self._seconds = late, seconds
        self._longest: dict[str, float] = {}  # by the name of the step
        self._news = threading.Condition()
        self._running: tuple[str, float] | None = None
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watch(self, step: str) -> Iterator[None]:
        """For as long as a step of this name takes; one within another is part of it."""
        if self._running is not None:
            yield
            return
        self._start()
        self._running = step, time.monotonic()
        with self._news:
            self._news.notify()
        try:
            yield
        finally:
            self.progress()
            self._running = None

    def progress(self) -> None:
        """A part of the step is done: the time begins anew."""
        if self._running is not None:
            step, began = self._running
            now = time.monotonic()
            self._longest[step] = max(self._longest.get(step, 0.0), now - began)
            self._running = step, now

    def limit(self, step: str) -> float:
        """Seconds that a step of this name may take."""
        return max(self._seconds, FACTOR * self._longest.get(step, 0.0))

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="mlx-kv watchdog", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while True:
            with self._news:
                while self._running is None:
                    self._news.wait()
                running = self._running
            step, began = running
            left = began + self.limit(step) - time.monotonic()
            if left > 0:
                time.sleep(min(left, LOOKED * self._seconds))
            elif self._running == running:
                self._late(
                    f"{step} has taken {time.monotonic() - began:.0f} s: a rank, or the network between them, hangs; "
                    "start all ranks again"
                )
                return
