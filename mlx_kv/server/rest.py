"""A model that nobody asks anything: after so long its weights leave memory, and come back when they are next used.

Decides when. Knows nothing about jobs, nor what it takes to let weights go. Called in the thread that owns the models.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mlx_kv.server.models import Models

log = logging.getLogger("mlx_kv.server")


class Rest:
    """When weights are let go.

    Args:
        seconds: without a request; None keeps them.
        let_go: does it.
        lazy: whether they are let go at the start, too, when it is known whose caches these are.
        clock: tells seconds.
    """

    def __init__(
        self,
        seconds: float | None = None,
        let_go: Callable[[Models], None] = lambda models: None,
        lazy: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._let_go, self._lazy, self._clock = seconds, let_go, lazy, clock
        self._idle_since: float | None = None  # None: at work, or at rest
        self._rests = True  # until the first request there is nothing to let go, or it is wanted soon

    def begin(self, models: Models) -> None:
        """All is ready for the first request."""
        if self._lazy:
            self._let_go(models)

    def wait(self) -> float | None:
        """Seconds until it is time; None where that never comes by itself."""
        if self._seconds is None or self._rests or self._idle_since is None:
            return None
        return max(0.0, self._idle_since + self._seconds - self._clock())

    def look(self, idle: bool, models: Models) -> bool:
        """Lets weights go if it is time, and says whether it did.

        Args:
            idle: whether nobody asks anything.
        """
        if not idle:
            self._idle_since, self._rests = None, False
            return False
        if self._idle_since is None:
            self._idle_since = self._clock()
        if self.wait() != 0.0:
            return False
        self._rests = True
        try:
            self._let_go(models)
        except Exception:
            log.exception("the weights could not be let go, and stay in memory")
            return False
        log.info("nobody has asked anything for %g s: the weights are let go", self._seconds)
        return True
