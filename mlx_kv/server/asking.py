"""What the worker says, for those who wait on the event loop.

Decides how long one waits for a thread that may have ended. Knows nothing about what is asked.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TypeVar

from mlx_kv.server.errors import ApiError
from mlx_kv.server.worker import Worker

LOOK_EVERY = 0.1  # seconds between two looks at whether the worker lives
T = TypeVar("T")


async def told_by(worker: Worker, asked: Future[T]) -> T:
    """What the worker was asked for; raises what that raised, and ApiError where it ends before it has answered."""
    waiting = asyncio.wrap_future(asked)
    while not waiting.done():
        await asyncio.wait([waiting], timeout=LOOK_EVERY)
        if not waiting.done() and not worker.alive:
            raise ApiError(503, f"the server ends: {worker.failure or 'its worker has ended'}")
    return waiting.result()
