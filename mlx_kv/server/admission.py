"""Admission of requests, and delivery of the worker's output to their responses. Runs in the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from mlx_kv.server.job import Job, OutputChunk
from mlx_kv.server.json_http import SHUTTING_DOWN, ApiError
from mlx_kv.server.worker import Worker

KEEP_ALIVE = 15.0  # seconds without output after which a stream sends a sign of life, for proxies
COMPLETIONS = ("/v1/completions", "/completions")
CHATS = ("/v1/chat/completions", "/chat/completions")
RESPONSES, MESSAGES = ("/v1/responses", "/responses"), ("/v1/messages",)
OLLAMA_CHATS, OLLAMA_PROMPTS = ("/api/chat",), ("/api/generate",)
ENDPOINTS = dict.fromkeys(COMPLETIONS, "completions") | dict.fromkeys(CHATS, "chat")
ENDPOINTS |= dict.fromkeys(RESPONSES, "responses") | dict.fromkeys(MESSAGES, "messages")
ENDPOINTS |= dict.fromkeys(OLLAMA_CHATS, "ollama chat") | dict.fromkeys(OLLAMA_PROMPTS, "ollama generate")


class OutputCollector:
    """Output of the jobs of one request until it is taken; waiting chunks of a job are joined."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self._chunks: dict[Job, OutputChunk] = {}
        self._error: ApiError | None = None
        self._ready, self._silent = asyncio.Event(), False
        self._begun, self._unmatched = asyncio.Event(), len(jobs)
        self._tick()

    def _tick(self) -> None:
        """Checks regularly whether nothing came: a timer for each chunk would cost more than the chunk."""
        if self._silent:
            self._ready.set()
        self._silent = True
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE / 2, self._tick)

    def put(self, chunk: OutputChunk) -> None:
        """Adds a chunk; an error ends the request."""
        if chunk.error is not None:
            self.fail(ApiError(chunk.status, chunk.error))
            return
        before = self._chunks.get(chunk.job)
        self._chunks[chunk.job] = chunk if before is None else before.joined(chunk)
        self._ready.set()
        self._begun.set()

    def fail(self, error: ApiError) -> None:
        """Raises an error in `get`, after the chunks so far."""
        self._error = error
        self._ready.set()
        self._begun.set()

    async def get(self) -> list[OutputChunk]:
        """Waits for new chunks; an empty list after a long silence.

        Raises:
            ApiError: no more chunks will come.
        """
        await self._ready.wait()
        self._ready.clear()
        chunks, self._chunks, self._silent = list(self._chunks.values()), {}, False
        if self._error is not None:
            if not chunks:
                raise self._error
            self._ready.set()
        return chunks

    async def begun(self, seconds: float) -> bool:
        """Waits until all prompts have been looked up in the prefix cache, or output or an error has come.

        Args:
            seconds: to wait at most.

        Returns:
            Whether that happened in time.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._begun.wait(), seconds)
        return self._begun.is_set()

    def matched(self) -> None:
        """Called for each job when its prompt has been looked up."""
        self._unmatched -= 1
        if self._unmatched <= 0:
            self._begun.set()

    def close(self) -> None:
        """Ends the timer."""
        self._timer.cancel()


class AdmissionController:
    """Admits requests, and passes the worker's output to the responses.

    Args:
        max_requests: at a time, those waiting for a row included; each choice counts.

    Attributes:
        admitted: number of admitted requests without a complete response.
        closing: why no more requests are admitted; None while they are.
    """

    def __init__(self, worker: Worker, max_requests: int) -> None:
        self.worker, self.metrics, self._max_requests = worker, worker.metrics, max_requests
        self._collectors: dict[Job, OutputCollector] = {}
        self.admitted = 0
        self.closing: str | None = None

    def begin(self) -> None:
        """From now on, output is delivered in the running event loop."""
        loop = asyncio.get_running_loop()

        def deliver(chunks: list[OutputChunk]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._deliver, chunks)

        self.worker.deliver = deliver

    def _deliver(self, chunks: list[OutputChunk]) -> None:
        for chunk in chunks:
            if (collector := self._collectors.get(chunk.job)) is not None:  # else its client has hung up
                collector.put(chunk)

    def admit(self, choices: int = 1) -> None:
        """Admits a request with so many choices; `leave` must follow.

        Raises:
            ApiError: 429 if there are too many, 503 if the server ends, 400 if it could never be admitted.
        """
        if self.closing is not None:
            raise ApiError(503, self.closing)
        if choices > self._max_requests:
            most = f"and this server accepts at most {self._max_requests:,}: send fewer"
            raise ApiError(400, f"one request asks for {choices:,} answers, {most}")
        if self.admitted + choices > self._max_requests:
            message = f"{self.admitted} requests are being answered or wait: try again later"
            raise ApiError(429, message, None, "queue_full", {"Retry-After": "1"})
        self.admitted += choices

    def leave(self, choices: int = 1) -> None:
        """The counterpart of `admit`."""
        self.admitted -= choices

    def submit(self, jobs: Sequence[Job]) -> OutputCollector:
        """Submits the jobs of a request to the worker; returns the collector of their output."""
        collector = OutputCollector(jobs)
        loop = asyncio.get_running_loop()

        def matched() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(collector.matched)

        if self.closing is not None:  # since it was admitted
            collector.fail(ApiError(503, self.closing))
        for job in jobs:
            self._collectors[job], job.on_match = collector, matched
            self.worker.submit(job)
        return collector

    @property
    def jobs(self) -> list[Job]:
        """Jobs of admitted requests, from when their prompt is encoded."""
        return list(self._collectors)

    def done(self, job: Job, ended: bool) -> None:
        """Releases a job; one that has not ended is cancelled."""
        self._collectors.pop(job).close()
        if not ended:
            self.worker.cancel(job)

    def give_up(self, reason: str = SHUTTING_DOWN) -> None:
        """Ends all responses with an error, and admits no more requests.

        Each has a collector, also those with a job that the worker has not seen. So nothing depends on what its thread
        did last.
        """
        self.closing = self.closing or reason
        for collector in set(self._collectors.values()):
            collector.fail(ApiError(503, self.closing))

    def count(self, path: str, status: int) -> None:
        """Counts a response in the metrics."""
        self.metrics.requests.labels(ENDPOINTS.get(path, "other"), str(status)).inc()
