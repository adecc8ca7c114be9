"""Other processes that use a store: of their own, but what they import is imported once."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

# Elsewhere what is imported may not be forked.
PROCESSES = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
PROCESSES.set_forkserver_preload(["mlx_kv", "mlx_kv.prefixes.store"])


def start(target: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    """Another process, and what it says."""
    said, saying = PROCESSES.Pipe(duplex=False)
    child = PROCESSES.Process(target=target, args=(*arguments, saying), daemon=True)
    child.start()
    saying.close()  # so that the end of a child that fails is heard
    return child, said
