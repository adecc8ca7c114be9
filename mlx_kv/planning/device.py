"""The device of this process: the dtype that it computes in, and the memory that models and caches may take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_kv.cache.buffers import on_cpu
from mlx_kv.planning.planner import config_dtype

DEVICE_SHARE = 0.8  # of the device's memory, as the default limit; activations and copies need some, too


def device_dtype(config: dict[str, Any]) -> str:
    """The name of the dtype in which the model of a configuration computes here: on a CPU float32 (`mlxlm.loading`)."""
    return "float32" if on_cpu() else config_dtype(config)


def default_limit() -> int | None:
    """A share of the device's memory in bytes; None if its size is unknown."""
    info: dict[str, Any] = mx.device_info()
    if on_cpu():
        memory = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
        container = Path("/sys/fs/cgroup/memory.max")
        if container.exists() and (text := container.read_text().strip()).isdigit():
            memory.append(int(text))
        return int(DEVICE_SHARE * min(memory))
    for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if info.get(name):
            return int(DEVICE_SHARE * int(info[name]))
    return None
