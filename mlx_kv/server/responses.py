"""The answer to one request that was let in: whole or streamed, until it ends or the client hangs up.

Decides how an answer is sent as it comes, and gives its place back as soon as nobody takes it. Knows nothing about
routes, keys or how a request is read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mlx_kv.server.admission import ENDPOINTS, AdmissionController
from mlx_kv.server.chat_output import ChatOutputParser, Delta
from mlx_kv.server.errors import ApiError
from mlx_kv.server.job import Job
from mlx_kv.server.requests import CompletionRequest
from mlx_kv.server.response_objects import ResponseBuilder, event, usage_of

STALLED = 60.0  # seconds after which a client that takes nothing of its answer has hung up
log = logging.getLogger("mlx_kv.server")


class CompletionResponse(Response):
    """One request that was let in, while it is being answered."""

    def __init__(self, admission: AdmissionController, request: CompletionRequest, job: Job) -> None:
        super().__init__()
        self._admission, self._request, self._job = admission, request, job
        self._parser = (
            ChatOutputParser(admission.worker.models.tokenizer, job.tokens, request.tools, request.stream)
            if request.chat
            else None
        )
        self._builder, self._generated, self._finish = ResponseBuilder(request, admission.name), 0, ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        admission, job, status = self._admission, self._job, 499
        self._collector = admission.submit(job)
        gone = asyncio.create_task(self._hung_up(receive))
        work = asyncio.create_task((self._stream if self._request.stream else self._whole)(scope, receive, send))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                status = work.result()
        finally:
            gone.cancel()
            work.cancel()
            admission.leave()
            admission.done(job, ended=self._finish != "")
            admission.count(scope["path"], status)
            admission.metrics.duration.labels(ENDPOINTS[scope["path"]]).observe(time.monotonic() - job.since)

    async def _hung_up(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _deltas(self) -> AsyncIterator[Delta | None]:
        """The parts of the answer as they come; None where nothing came for long.

        Raises:
            ApiError: the worker gave up, or the server.
        """
        while not self._finish:
            chunk = await self._collector.get()
            if chunk is None:
                yield None
                continue
            if self._generated == 0 and chunk.tokens:
                self._admission.metrics.first_token.observe(time.monotonic() - self._job.since)
            self._generated += chunk.tokens
            self._finish = chunk.finish_reason or ""
            delta = Delta(chunk.text) if self._parser is None else self._parser.feed(chunk.text)
            if self._finish and self._parser is not None:
                delta.add(self._parser.finish())
                if self._parser.called and self._finish == "stop":
                    self._finish = "tool_calls"
            yield delta

    @property
    def _usage(self) -> dict[str, Any]:
        return usage_of(len(self._job.tokens), self._generated, self._job.cached)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> int:
        answer = Delta()
        try:
            async for delta in self._deltas():
                answer.add(delta or Delta())
        except Exception as raised:
            error = _as_api_error(raised)
            await JSONResponse(error.body, error.status)(scope, receive, send)
            return error.status
        await JSONResponse(self._builder.whole(answer, self._finish, self._usage))(scope, receive, send)
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

        status, builder = 200, self._builder
        try:
            async for delta in self._deltas():
                if delta is None:
                    await write(b": still there\n\n")
                elif self._finish:
                    if delta.fields or not self._request.chat:
                        await write(event(builder.chunk(delta)))
                    await write(event(builder.chunk(Delta(), self._finish)))
                elif delta.fields:
                    await write(event(builder.chunk(delta)))
            if self._request.include_usage:
                await write(event(builder.usage_chunk(self._usage)))
        except Exception as raised:
            error = _as_api_error(raised)
            status = error.status
            await write(event(error.body))
        await write(b"data: [DONE]\n\n", more=False)
        return status


def _as_api_error(raised: Exception) -> ApiError:
    """What a client is told of what went wrong; an answer always comes to a proper end."""
    if isinstance(raised, ApiError):
        return raised
    log.error("an answer could not be given", exc_info=raised)
    return ApiError(500, "the server failed while it answered: see its log")
