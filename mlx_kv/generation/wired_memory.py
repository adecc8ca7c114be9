"""MLX's wired limit: how much memory macOS must not page out while an engine generates.

Wired weights are not paged out, which matters to models that are large for their machine. A wired limit has also been
part of every reproduced kernel panic of ml-explore/mlx#3186, so small models run without one.
"""

from __future__ import annotations

import threading
from typing import Any, Literal
from weakref import WeakSet

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.mlxlm.loading import weight_bytes

WiredLimit = int | Literal["auto", "none"]
LARGE = 0.5  # weights above this share of the recommended limit are wired by "auto"


class WiredMemory:
    """The wired limit of this process. It is set while any engine generates, and restored after the last one.

    Attributes:
        limit: bytes; "none" leaves MLX's limit as it is; "auto" sets the recommended limit for large models only.
    """

    def __init__(self) -> None:
        self.limit: WiredLimit = "auto"
        self._engines: WeakSet[Any] = WeakSet()
        self._before: int | None = None  # the limit to be restored
        self._lock = threading.Lock()

    def choose(self, limit: WiredLimit) -> None:
        """Sets the limit of engines that begin from now on.

        Raises:
            ValueError: a number of bytes that this device does not support.
        """
        if isinstance(limit, int):
            most = recommended_limit()
            if most is None:
                raise ValueError("--wired-limit is for GPUs of Macs: leave it out here, or give none or auto")
            if limit > most:
                raise ValueError(
                    f"--wired-limit {limit:,}: this device wires {most:,} bytes at most; give less, or raise "
                    "the system's limit with sysctl iogpu.wired_limit_mb"
                )
        self.limit = limit

    def begin(self, engine: object, model: nn.Module) -> None:
        """Called before the first step of an engine of a model."""
        with self._lock:
            self._engines.add(engine)
            if self._before is None and (limit := self._bytes(model)):
                self._before = mx.set_wired_limit(limit)

    def end(self, engine: object, stream: Any) -> None:
        """Called when an engine is closed.

        Args:
            stream: of the engine: the limit must not change while it evaluates.
        """
        with self._lock:
            self._engines.discard(engine)
            if self._before is not None and not self._engines:
                mx.synchronize(stream)
                mx.set_wired_limit(self._before)
                self._before = None

    def _bytes(self, model: nn.Module) -> int:
        """The limit for an engine of a model; 0 sets none."""
        if self.limit == "none":
            return 0
        if self.limit != "auto":
            return self.limit
        most = recommended_limit() or 0
        return most if weight_bytes(model) > LARGE * most else 0


def recommended_limit() -> int | None:
    """The largest wired limit of the default device, in bytes; None where memory can't be wired."""
    info: dict[str, Any] = mx.device_info()
    return info.get("max_recommended_working_set_size")


wired_memory = WiredMemory()
