"""Ends ranks that hang: a time limit for each step, and SIGTERM for a follower whose leader does not end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from mlx_kv.ranks.link import EXIT_CODE, leave

STEP_SECONDS = 120.0  # that any step may take: the first ones read weights, and compile
FACTOR = 20.0  # times the longest step so far, if that is more
CHECK_INTERVAL = 0.25  # of the time that a step may take
SIGTERM_APART = 1.0  # seconds between two SIGTERMs that count as two: some supervisors send several at once
BREAK_UP_SECONDS = 1.0  # for the message to the leader, which may be stopped and read nothing


class Watchdog:
    """Calls `on_late` with a reason when a step takes far longer than any before it.

    Args:
        seconds: that any step may take.
    """

    def __init__(self, on_late: Callable[[str], None], seconds: float = STEP_SECONDS) -> None:
        self._on_late, self._seconds = on_late, seconds
        self._longest: dict[str, float] = {}  # seconds, by the name of the step
        self._started = threading.Condition()
        self._running: tuple[str, float] | None = None  # name and start of the current step
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watch(self, step: str) -> Iterator[None]:
        """Limits the time of a step with this name. A step within another one is part of it."""
        if self._running is not None:
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._check, name="mlx-kv watchdog", daemon=True)
            self._thread.start()
        self._running = step, time.monotonic()
        with self._started:
            self._started.notify()
        try:
            yield
        finally:
            self.progress()
            self._running = None

    def progress(self) -> None:
        """A part of the step is done: its time starts again."""
        if self._running is not None:
            step, start = self._running
            now = time.monotonic()
            self._longest[step] = max(self._longest.get(step, 0.0), now - start)
            self._running = step, now

    def limit(self, step: str) -> float:
        """Seconds that a step with this name may take."""
        return max(self._seconds, FACTOR * self._longest.get(step, 0.0))

    def _check(self) -> None:
        while True:
            with self._started:
                while self._running is None:
                    self._started.wait()
                running = self._running
            step, start = running
            left = start + self.limit(step) - time.monotonic()
            if left > 0:
                time.sleep(min(left, CHECK_INTERVAL * self._seconds))
            elif self._running == running:
                self._on_late(
                    f"{step} has taken {time.monotonic() - start:.0f} s: a rank, or the network between them, hangs; "
                    "start all ranks again"
                )
                return


def leave_signals_to_leader(rank: int, fail: Callable[[str], None]) -> None:
    """From now on SIGINT is ignored, and SIGTERM ends this rank only if it comes a second time, a second later or more.

    Launchers send both to all ranks at once, and then the leader ends in order, which can take long. Call this in the
    main thread. Signals are handled in another one: the main thread may be waiting in a collective forever.

    Args:
        fail: ends all ranks, with a reason.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)  # system calls of MLX go on
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=_handle_signals, args=(read_end, rank, fail), name="mlx-kv signals", daemon=True).start()


def _handle_signals(read_end: int, rank: int, fail: Callable[[str], None]) -> None:
    first: float | None = None
    while numbers := os.read(read_end, 64):
        if signal.SIGTERM not in numbers:
            continue
        if first is None:
            first = time.monotonic()
        elif time.monotonic() - first > SIGTERM_APART:
            reason = "stopped by a second SIGTERM, while the leader has not ended"
            breaking_up = threading.Thread(target=fail, args=(reason,), daemon=True)
            breaking_up.start()
            breaking_up.join(BREAK_UP_SECONDS)
            leave(f"rank {rank}: {reason}", EXIT_CODE)
