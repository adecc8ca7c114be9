"""MLX's cache limit: how many bytes of freed buffers MLX keeps for reuse, instead of returning them to the system.

A buffer is reused only for arrays of nearly its size. Rows and cached prefixes of a server come in many sizes, so what
they free adds up to the limit. On Macs MLX's own limit is about the memory of the device; on a CPU it is 32 MiB.
"""

from __future__ import annotations

import threading

import mlx.core as mx

SHARE = 1 / 8  # of the memory for rows and cached prefixes
LEAST = 32 * 2**20  # bytes; the buffers of a step are reused in the next one


class FreedMemory:
    """The cache limit of this process: the lowest that any of its servers needs, restored after the last one."""

    def __init__(self) -> None:
        self._limits: dict[object, int] = {}
        self._before = 0  # the limit to be restored
        self._lock = threading.Lock()

    def begin(self, server: object, for_rows: int | None) -> int | None:
        """Sets the limit for a server, which never raises MLX's own.

        Args:
            for_rows: bytes for rows and cached prefixes; None is no limit, and then MLX's stays as it is.

        Returns:
            The limit in bytes; None if it stays as it is.
        """
        if for_rows is None:
            return None
        limit = max(LEAST, int(SHARE * for_rows))
        with self._lock:
            if not self._limits:
                self._before = mx.set_cache_limit(limit)  # returns the previous one
            self._limits[server] = min(limit, self._before)
            mx.set_cache_limit(min(self._limits.values()))
            return self._limits[server]

    def end(self, server: object) -> None:
        """Called when a server has ended; does nothing if it has set no limit."""
        with self._lock:
            if self._limits.pop(server, None) is not None:
                mx.set_cache_limit(min(self._limits.values(), default=self._before))


freed_memory = FreedMemory()
