"""How many requests are let in, and which answer each chunk of the worker's output goes to.

Decides when a request is turned away, lets the worker go as soon as nobody wants an answer, and ends what waits when
there is no worker any longer. Lives in the event loop. Knows nothing about routes, keys or what an answer looks like.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from mlx_kv.server.errors import SHUTTING_DOWN, ApiError
from mlx_kv.server.job import Job, OutputChunk
from mlx_kv.server.metrics import Metrics
from mlx_kv.server.slots import Slots
from mlx_kv.server.worker import Worker

KEEP_ALIVE = 15.0  # seconds after which a stream that has nothing to say says so, for proxies
WATCH_EVERY = 0.1  # seconds between two looks at whether the worker lives
COMPLETIONS = ("/v1/completions", "/completions")
CHATS = ("/v1/chat/completions", "/chat/completions")
RESPONSES, MESSAGES = ("/v1/responses", "/responses"), ("/v1/messages",)
ENDPOINTS = dict.fromkeys(COMPLETIONS, "completions") | dict.fromkeys(CHATS, "chat")
ENDPOINTS |= dict.fromkeys(RESPONSES, "responses") | dict.fromkeys(MESSAGES, "messages")


class OutputCollector:
    """The output of the jobs of one request that nobody has taken yet; of each, chunks that wait become one."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self._chunks: dict[Job, OutputChunk] = {}
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
            self.fail(ApiError(chunk.status, chunk.error))
            return
        before = self._chunks.get(chunk.job)
        self._chunks[chunk.job] = chunk if before is None else before.joined(chunk)
        self._ready.set()

    def fail(self, error: ApiError) -> None:
        self._error = error
        self._ready.set()

    async def get(self) -> list[OutputChunk]:
        """Waits for what is new; nothing where nothing came for long.

        Raises:
            ApiError: nothing more will come.
        """
        await self._ready.wait()
        self._ready.clear()
        chunks, self._chunks, self._silent = list(self._chunks.values()), {}, False
        if self._error is not None:
            if not chunks:
                raise self._error
            self._ready.set()
        return chunks

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
        self._jobs: dict[int, Job] = {}
        self.slots = Slots(worker.max_batch_size)
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

    def admit(self, answers: int = 1) -> None:
        """Lets one more request in, with so many answers; `leave` is to follow.

        Raises:
            ApiError: 429 if there are too many, 503 if the server ends, 400 if it could never be let in.
        """
        if self._closing is not None:
            raise ApiError(503, self._closing)
        if answers > self._most:
            raise ApiError(400, f"one request asks for {answers:,} answers, and {self._most:,} are the most: send less")
        if self._admitted + answers > self._most:
            message = f"{self._admitted} requests are being answered or wait: try again later"
            raise ApiError(429, message, None, "queue_full", {"Retry-After": "1"})
        self._admitted += answers

    def leave(self, answers: int = 1) -> None:
        self._admitted -= answers

    def submit(self, jobs: Sequence[Job]) -> OutputCollector:
        """Hands the jobs of a request to the worker; their chunks come to the collector."""
        collector = OutputCollector(jobs)
        if self._closing is not None:  # while its prompt was made tokens
            collector.fail(ApiError(503, self._closing))
        for job in jobs:
            self._collectors[job.number] = collector
            self._jobs[job.number] = job
            self.worker.submit(job)
        return collector

    @property
    def closing(self) -> str | None:
        """Why nobody is let in any longer."""
        return self._closing

    @property
    def admitted(self) -> int:
        """How many requests were let in and are not answered yet."""
        return self._admitted

    @property
    def jobs(self) -> list[Job]:
        """Those of them whose prompt is tokens by now."""
        return list(self._jobs.values())

    def done(self, job: Job, ended: bool) -> None:
        """Nobody waits for this job any longer; one that has not ended is let go."""
        del self._jobs[job.number]
        self.slots.leave(job)
        self._collectors.pop(job.number).close()
        if not ended:
            self.worker.cancel(job)

    def give_up(self, why: str = SHUTTING_DOWN) -> None:
        """Ends all answers with an error, and lets nobody in."""
        self._closing = self._closing or why
        for collector in set(self._collectors.values()):
            collector.fail(ApiError(503, self._closing))

    def count(self, path: str, status: int) -> None:
        self.metrics.requests.labels(ENDPOINTS.get(path, "other"), str(status)).inc()
