"""How many requests are let in, and which answer each chunk of the worker's output goes to.

Decides when a request is turned away, lets the worker go as soon as nobody wants an answer, and ends what waits when
there is no worker any longer. Lives in the event loop. Knows nothing about routes, keys or what an answer looks like.
"""

from __future__ import annotations

import asyncio
import contextlib

from mlx_kv.server.errors import ApiError
from mlx_kv.server.job import Job, OutputChunk
from mlx_kv.server.metrics import Metrics
from mlx_kv.server.worker import Worker

KEEP_ALIVE = 15.0  # seconds after which a stream that has nothing to say says so, for proxies
WATCH_EVERY = 0.1  # seconds between two looks at whether the worker lives
SHUTTING_DOWN = "the server is shutting down"
ENDPOINTS = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}


class OutputCollector:
    """The output of one job that nobody has taken yet; chunks that wait become one."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._chunk: OutputChunk | None = None
        self._error: ApiError | None = None
        self._ready, self._silent = asyncio.Event(), False
        self._tick()

    def _tick(self) -> None:
        """Looks now and then whether nothing came: a timer for each chunk would cost more than the chunk."""
        if self._silent:
            self._ready.set()
        self._silent = True
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE / 2, self._tick)

    def put(self, chunk: OutputChunk) -> None:
        if chunk.error is not None:
            self.fail(ApiError(500, chunk.error))
            return
        self._chunk = chunk if self._chunk is None else self._chunk.joined(chunk)
        self._ready.set()

    def fail(self, error: ApiError) -> None:
        self._error = error
        self._ready.set()

    async def get(self) -> OutputChunk | None:
        """Waits for what is new; None where nothing came for long.

        Raises:
            ApiError: nothing more will come.
        """
        await self._ready.wait()
        self._ready.clear()
        chunk, self._chunk, self._silent = self._chunk, None, False
        if self._error is not None:
            if chunk is None:
                raise self._error
            self._ready.set()
        return chunk

    def close(self) -> None:
        self._timer.cancel()


class AdmissionController:
    """Lets requests in, and hands the worker's output to the answers that wait for it.

    Args:
        most: requests at once, those that wait for a row included.
    """

    def __init__(self, worker: Worker, metrics: Metrics, name: str, most: int) -> None:
        self.worker, self.metrics, self.name, self._most = worker, metrics, name, most
        self._collectors: dict[int, OutputCollector] = {}  # by number of the job
        self._admitted = 0
        self._closing: str | None = None  # why nobody is let in any longer

    def begin(self) -> None:
        """From now on chunks come to the running event loop."""
        loop = asyncio.get_running_loop()

        def deliver(chunks: list[OutputChunk]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear
                loop.call_soon_threadsafe(self._arrived, chunks)

        self.worker.deliver = deliver

    async def watch(self) -> None:
        """Ends all answers as soon as the worker has ended, however that came about.

        Whatever waits has a collector: also a job that the worker has never seen. So nothing that the worker's thread
        could have done in its last moment is relied on.
        """
        while self.worker.alive:
            await asyncio.sleep(WATCH_EVERY)
        self.give_up(f"the server ends: {self.worker.failure or 'its worker has ended'}")

    def _arrived(self, chunks: list[OutputChunk]) -> None:
        for chunk in chunks:
            if chunk.job.number in self._collectors:  # or its client has hung up
                self._collectors[chunk.job.number].put(chunk)

    def admit(self) -> None:
        """Lets one more request in; `leave` is to follow.

        Raises:
            ApiError: 429 if there are too many, 503 if the server ends.
        """
        if self._closing is not None:
            raise ApiError(503, self._closing)
        if self._admitted >= self._most:
            message = f"{self._admitted} requests are being answered or wait: try again later"
            raise ApiError(429, message, None, "queue_full", {"Retry-After": "1"})
        self._admitted += 1

    def leave(self) -> None:
        self._admitted -= 1

    def submit(self, job: Job) -> OutputCollector:
        """Hands a job to the worker; its chunks come to the collector."""
        collector = self._collectors[job.number] = OutputCollector(job)
        if self._closing is not None:  # while its prompt was made tokens
            collector.fail(ApiError(503, self._closing))
        self.worker.submit(job)
        return collector

    @property
    def admitted(self) -> int:
        """How many requests were let in and are not answered yet."""
        return self._admitted

    @property
    def jobs(self) -> list[Job]:
        """Those of them whose prompt is tokens by now."""
        return [collector.job for collector in self._collectors.values()]

    def done(self, job: Job, ended: bool) -> None:
        """Nobody waits for this job any longer; one that has not ended is let go."""
        self._collectors.pop(job.number).close()
        if not ended:
            self.worker.cancel(job)

    def give_up(self, why: str = SHUTTING_DOWN) -> None:
        """Ends all answers with an error, and lets nobody in."""
        self._closing = self._closing or why
        for collector in self._collectors.values():
            collector.fail(ApiError(503, self._closing))

    def count(self, path: str, status: int) -> None:
        self.metrics.requests.labels(ENDPOINTS.get(path, "other"), str(status)).inc()
