"""The HTTP response to an admitted request: whole or streamed, until it ends or the client hangs up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mlx_kv.server.access import JOBS
from mlx_kv.server.admission import ENDPOINTS, AdmissionController
from mlx_kv.server.answers import AnswerWriter, Choice, Delta
from mlx_kv.server.errors import ApiError, error_body
from mlx_kv.server.json_http import JsonResponse

STREAMED = "mlx_kv.streamed"  # key of a request's scope: its response is sent in chunks, unless to HTTP/1.0
STALLED = 60.0  # seconds after which a client that stops reading counts as hung up
log = logging.getLogger("mlx_kv.server")


class CompletionResponse(Response):
    """The response to one admitted request.

    Args:
        choices: its answers, with jobs that are submitted when the response begins.
        stream: whether they are sent as they come.
    """

    def __init__(
        self, admission: AdmissionController, choices: Sequence[Choice], writer: AnswerWriter, stream: bool
    ) -> None:
        super().__init__()
        self._admission, self._choices, self._writer = admission, choices, writer
        self._by_job = {choice.job: choice for choice in choices}
        self._streams, self._since = stream, choices[0].job.since

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        admission, status = self._admission, 499
        scope[JOBS] = [choice.job for choice in self._choices]
        self._collector = admission.submit([choice.job for choice in self._choices])
        gone = asyncio.create_task(self._hung_up(receive))

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALLED):
                await send(message)

        work = asyncio.create_task((self._stream if self._streams else self._whole)(scope, receive, send_in_time))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                status = work.result()
        except TimeoutError:  # the client has stopped reading
            status = 499
        finally:
            gone.cancel()
            work.cancel()
            admission.leave(len(self._choices))
            for choice in self._choices:
                admission.done(choice.job, ended=choice.finish_reason != "")
            admission.count(scope["path"], status)
            endpoint = ENDPOINTS.get(scope["path"], "other")
            admission.metrics.duration.labels(endpoint).observe(time.monotonic() - self._since)

    async def _hung_up(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _deltas(self) -> AsyncIterator[tuple[Choice, Delta] | None]:
        """The parts of the answers as they come; None after some seconds without any.

        Raises:
            ApiError: the job failed, or the server ends.
        """
        while not all(choice.finish_reason for choice in self._choices):
            chunks = await self._collector.get()
            if not chunks:
                yield None
            for chunk in chunks:
                choice = self._by_job[chunk.job]
                if choice.generated == 0 and chunk.tokens:
                    self._admission.metrics.first_token.observe(time.monotonic() - self._since)
                yield choice, choice.take(chunk)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> int:
        try:
            async for part in self._deltas():
                if part is not None:
                    choice, delta = part
                    choice.answer.add(delta)
            answer = JsonResponse(self._writer.whole(self._choices))
        except Exception as raised:
            error = _as_api_error(raised)
            await JsonResponse(error_body(error, scope["path"]), error.status)(scope, receive, send)
            return error.status
        await answer(scope, receive, send)
        return 200

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> int:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        scope[STREAMED] = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def write(data: bytes, more: bool = True) -> None:
            if data or not more:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        status, writer = 200, self._writer
        try:
            await write(writer.begin(self._choices))
            async for part in self._deltas():
                await write(writer.waiting if part is None else writer.part(*part))
            await write(writer.end(self._choices))
        except TimeoutError:
            raise
        except Exception as raised:
            error = _as_api_error(raised)
            status = error.status
            await write(writer.failed(error))
        await write(writer.last, more=False)
        return status


def _as_api_error(raised: Exception) -> ApiError:
    """The error for the client: every response ends properly."""
    if isinstance(raised, ApiError):
        return raised
    log.error("an answer could not be given", exc_info=raised)
    return ApiError(500, "the server failed while it answered: see its log")
