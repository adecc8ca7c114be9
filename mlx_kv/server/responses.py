"""From a job to an answer: whole or streamed, until it ends or the client hangs up.

Decides how many requests are let in, gives a row back as soon as nobody wants it, and ends what waits when there is no
worker any longer. Knows nothing about routes, keys or how a request is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mlx_kv.server.job import Job, OutputChunk
from mlx_kv.server.metrics import Metrics
from mlx_kv.server.requests import ApiError, CompletionRequest
from mlx_kv.server.response_objects import ChatOutputParser, Delta, ResponseBuilder, event, usage_of
from mlx_kv.server.worker import Worker

KEEP_ALIVE = 15.0  # seconds after which a stream that has nothing to say says so, for proxies
STALLED = 60.0  # seconds after which a client that takes nothing of its answer has hung up
WATCH_EVERY = 0.1  # seconds between two looks at whether the worker lives
SHUTTING_DOWN = "the server is shutting down"
ENDPOINTS = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
log = logging.getLogger("mlx_kv.server")


class OutputCollector:
    """What the worker said of one job and nobody has heard yet; pieces that wait become one."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._piece: OutputChunk | None = None
        self._error: ApiError | None = None
        self._news, self._silent = asyncio.Event(), False
        self._tick()

    def _tick(self) -> None:
        """Looks now and then whether nothing came: a timer for each piece would cost more than the piece."""
        if self._silent:
            self._news.set()
        self._silent = True
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE / 2, self._tick)

    def put(self, piece: OutputChunk) -> None:
        if piece.error is not None:
            self.fail(ApiError(500, piece.error))
            return
        self._piece = piece if self._piece is None else self._piece.joined(piece)
        self._news.set()

    def fail(self, error: ApiError) -> None:
        self._error = error
        self._news.set()

    async def get(self) -> OutputChunk | None:
        """Waits for what is new; None where nothing came for long.

        Raises:
            ApiError: nothing more will come.
        """
        await self._news.wait()
        self._news.clear()
        piece, self._piece, self._silent = self._piece, None, False
        if self._error is not None:
            if piece is None:
                raise self._error
            self._news.set()
        return piece

    def close(self) -> None:
        self._timer.cancel()


class AdmissionController:
    """Lets requests in, and hands the worker's pieces to the answers that wait for them. Lives in the event loop.

    Args:
        most: requests at once, those that wait for a row included.
    """

    def __init__(self, worker: Worker, metrics: Metrics, name: str, most: int) -> None:
        self.worker, self.metrics, self.name, self._most = worker, metrics, name, most
        self._mailboxes: dict[int, OutputCollector] = {}  # by number of the job
        self._admitted = 0
        self._closing: str | None = None  # why nobody is let in any longer

    def begin(self) -> None:
        """From now on pieces come to the running event loop."""
        loop = asyncio.get_running_loop()

        def deliver(pieces: list[OutputChunk]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear
                loop.call_soon_threadsafe(self._arrived, pieces)

        self.worker.deliver = deliver

    async def watch(self) -> None:
        """Ends all answers as soon as the worker has ended, however that came about.

        Whatever waits has a mailbox: also a job that the worker has never seen. So nothing that the worker's thread
        could have done in its last moment is relied on.
        """
        while self.worker.alive:
            await asyncio.sleep(WATCH_EVERY)
        self.give_up(f"the server ends: {self.worker.failure or 'its worker has ended'}")

    def _arrived(self, pieces: list[OutputChunk]) -> None:
        for piece in pieces:
            if piece.job.number in self._mailboxes:  # or its client has hung up
                self._mailboxes[piece.job.number].put(piece)

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
        """Hands a job to the worker; its pieces come to the mailbox."""
        mailbox = self._mailboxes[job.number] = OutputCollector(job)
        if self._closing is not None:  # while its prompt was made tokens
            mailbox.fail(ApiError(503, self._closing))
        self.worker.submit(job)
        return mailbox

    @property
    def admitted(self) -> int:
        """How many requests were let in and are not answered yet."""
        return self._admitted

    @property
    def jobs(self) -> list[Job]:
        """Those of them whose prompt is tokens by now."""
        return [mailbox.job for mailbox in self._mailboxes.values()]

    def done(self, job: Job, ended: bool) -> None:
        """Nobody waits for this job any longer; one that has not ended is let go."""
        self._mailboxes.pop(job.number).close()
        if not ended:
            self.worker.cancel(job)

    def give_up(self, why: str = SHUTTING_DOWN) -> None:
        """Ends all answers with an error, and lets nobody in."""
        self._closing = self._closing or why
        for mailbox in self._mailboxes.values():
            mailbox.fail(ApiError(503, self._closing))

    def count(self, path: str, status: int) -> None:
        self.metrics.requests.labels(ENDPOINTS.get(path, "other"), str(status)).inc()


class CompletionResponse(Response):
    """One request that was let in, while it is being answered."""

    def __init__(self, desk: AdmissionController, asked: CompletionRequest, job: Job) -> None:
        super().__init__()
        self._desk, self._asked, self._job = desk, asked, job
        self._text = (
            ChatOutputParser(desk.worker.models.tokenizer, job.tokens, asked.tools, asked.stream)
            if asked.chat
            else None
        )
        self._reply, self._generated, self._finish = ResponseBuilder(asked, desk.name), 0, ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        desk, job, status = self._desk, self._job, 499
        self._mailbox = desk.submit(job)
        gone = asyncio.create_task(self._hung_up(receive))
        work = asyncio.create_task((self._stream if self._asked.stream else self._whole)(scope, receive, send))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                status = work.result()
        finally:
            gone.cancel()
            work.cancel()
            desk.leave()
            desk.done(job, ended=self._finish != "")
            desk.count(scope["path"], status)
            desk.metrics.duration.labels(ENDPOINTS[scope["path"]]).observe(time.monotonic() - job.since)

    async def _hung_up(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _said(self) -> AsyncIterator[Delta | None]:
        """The parts of the answer as they come; None where nothing came for long.

        Raises:
            ApiError: the worker gave up, or the server.
        """
        while not self._finish:
            piece = await self._mailbox.get()
            if piece is None:
                yield None
                continue
            if self._generated == 0 and piece.tokens:
                self._desk.metrics.first_token.observe(time.monotonic() - self._job.since)
            self._generated += piece.tokens
            self._finish = piece.finish_reason or ""
            said = Delta(piece.text) if self._text is None else self._text.feed(piece.text)
            if self._finish and self._text is not None:
                said.add(self._text.finish())
                if self._text.called and self._finish == "stop":
                    self._finish = "tool_calls"
            yield said

    @property
    def _usage(self) -> dict[str, Any]:
        return usage_of(len(self._job.tokens), self._generated, self._job.cached)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> int:
        answer = Delta()
        try:
            async for said in self._said():
                answer.add(said or Delta())
        except Exception as raised:
            error = _told(raised)
            await JSONResponse(error.body, error.status)(scope, receive, send)
            return error.status
        await JSONResponse(self._reply.whole(answer, self._finish, self._usage))(scope, receive, send)
        return 200

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> int:
        try:
            return await self._events(send)
        except TimeoutError:  # its place is wanted by others
            return 499

    async def _events(self, send: Send) -> int:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def write(data: bytes, more: bool = True) -> None:
            async with asyncio.timeout(STALLED):
                await send({"type": "http.response.body", "body": data, "more_body": more})

        status, reply = 200, self._reply
        try:
            async for said in self._said():
                if said is None:
                    await write(b": still there\n\n")
                elif self._finish:
                    if said.fields or not self._asked.chat:
                        await write(event(reply.chunk(said)))
                    await write(event(reply.chunk(Delta(), self._finish)))
                elif said.fields:
                    await write(event(reply.chunk(said)))
            if self._asked.include_usage:
                await write(event(reply.usage_chunk(self._usage)))
        except Exception as raised:
            error = _told(raised)
            status = error.status
            await write(event(error.body))
        await write(b"data: [DONE]\n\n", more=False)
        return status


def _told(raised: Exception) -> ApiError:
    """What a client is told of what went wrong; an answer always comes to a proper end."""
    if isinstance(raised, ApiError):
        return raised
    log.error("an answer could not be given", exc_info=raised)
    return ApiError(500, "the server failed while it answered: see its log")
