"""Changes of what all of a process shares, such as a module of mlx-lm's: one after the other, each of them whole.

A destructor runs at any moment, also in the middle of a change by the same thread, which no lock keeps it from. What it
wants changed waits for the end of that. Knows nothing about what is changed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Changes:
    """Makes changes in the order in which they are asked for."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._changing = False

    def make(self, change: Callable[[], None]) -> None:
        """It is made when this returns; or, asked for within another one, when that is."""
        self._waiting.append(change)
        while True:
            with self._lock:
                if self._changing:  # by this thread: it goes on with what waits
                    return
                self._changing = True
                try:
                    while self._waiting:
                        self._waiting.popleft()()
                finally:
                    self._changing = False
            if not self._waiting:  # nothing came at the last moment
                return
