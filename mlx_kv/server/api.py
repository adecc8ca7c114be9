"""HTTP: routes, limits and keys.

Decides what is answered with which status, and what a request may take of the server. Every error is an OpenAI-style
object. Knows nothing about MLX, nor how an answer comes about.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlx_kv.generation.encoding import encode_prompt
from mlx_kv.server.access import AccessRules, ApiKeys
from mlx_kv.server.admission import AdmissionController
from mlx_kv.server.bodies import read_body
from mlx_kv.server.chat import encode_chat
from mlx_kv.server.errors import ApiError
from mlx_kv.server.job import Job
from mlx_kv.server.memory_report import memory_report, set_gauges
from mlx_kv.server.metrics import Metrics
from mlx_kv.server.requests import CompletionRequest, parse
from mlx_kv.server.responses import CompletionResponse
from mlx_kv.server.stop_strings import StopStrings
from mlx_kv.server.task_thread import TaskThread, TaskThreadError
from mlx_kv.server.worker import Worker

PAGE = Path(__file__).with_name("page.html")
PAGE_MAY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


@dataclass(frozen=True)
class Limits:
    """What a client may take.

    Attributes:
        body_bytes: of a request.
        body_seconds: for all of it to arrive.
        prompt_tokens: None is the context of the model, less one.
        queue: requests that wait for a row; more are turned away.
        max_tokens: where a request does not say.
        temperature: where a request does not say.
    """

    body_bytes: int = 4 * 2**20
    body_seconds: float = 60.0
    prompt_tokens: int | None = None
    queue: int = 64
    max_tokens: int = 512
    temperature: float = 0.0


class Api:
    """The Starlette application, as `app`.

    Args:
        worker: started; its output is taken from it as soon as the application starts.
        name: of the model, for clients.
        keys: any of which a client must send; none: all are let in.
        access: by which names clients may come, and from pages of which sites; None are those of this machine.
    """

    def __init__(
        self,
        worker: Worker,
        metrics: Metrics,
        name: str,
        limits: Limits | None = None,
        keys: Sequence[str] = (),
        access: AccessRules | None = None,
    ) -> None:
        self.worker, self.metrics, self.name, self.limits = worker, metrics, name, limits or Limits()
        self._keys = ApiKeys(keys)
        self.admission = AdmissionController(worker, metrics, name, worker.max_batch_size + self.limits.queue)
        self._created = time.time()
        # One thread for tokenizers: they are fast, but a long prompt would hold up everybody else's tokens.
        self._tokenizing = TaskThread("mlx-kv tokenizer")
        guarded = self._guarded
        self.app = Starlette(
            routes=[
                Route("/v1/completions", guarded(self._completions), methods=["POST"]),
                Route("/v1/chat/completions", guarded(self._chat), methods=["POST"]),
                Route("/v1/models", guarded(self._models)),
                Route("/v1/models/{name:path}", guarded(self._model)),
                Route("/metrics", guarded(self._metrics)),
                Route("/memory", guarded(self._memory)),
                Route("/health", self._health),
                Route("/", self._page),
            ],
            exception_handlers={ApiError: self._refused, HTTPException: self._not_found, Exception: self._failed},
            middleware=(access or AccessRules()).middleware(self._refused),
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.admission.begin()
        watching = asyncio.create_task(self.admission.watch())
        yield
        watching.cancel()

    # --- keys and errors ------------------------------------------------------------------------------------------

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            self._keys.check(request.headers)
            return await endpoint(request)

        return checked

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self.admission.count(request.url.path, error.status)
        return JSONResponse(error.body, error.status, error.headers)

    async def _not_found(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {404: f"there is no {request.url.path[:200]}", 405: f"{request.method} is not allowed here"}
        refusal = ApiError(
            error.status_code, messages.get(error.status_code, error.detail), headers=dict(error.headers or {})
        )
        return await self._refused(request, refusal)

    async def _failed(self, request: Request, error: Exception) -> Response:
        return await self._refused(request, ApiError(500, "the server failed: see its log"))

    # --- completions ----------------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        return await self._generate(request, chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, chat=True)

    async def _generate(self, request: Request, chat: bool) -> Response:
        since = time.monotonic()
        try:
            body = await read_body(request, self.limits.body_bytes, self.limits.body_seconds)
            completion = parse(body, chat, self.limits.temperature)
        except ClientDisconnect:
            raise ApiError(499, "the client hung up") from None
        if completion.model not in (None, self.name):
            raise ApiError(
                404, f"there is no model {completion.model[:200]!r} here: use {self.name!r}", "model", "model_not_found"
            )
        self.admission.admit()
        try:
            tokens = await asyncio.wrap_future(self._tokenizing.submit(lambda: self._encode(completion)))
            return CompletionResponse(self.admission, completion, self._job(completion, tokens, since))
        except BaseException as error:
            self.admission.leave()
            if isinstance(error, TaskThreadError):
                raise ApiError(500, f"the server failed: {error}") from error
            raise

    def _encode(self, completion: CompletionRequest) -> list[int]:
        """The prompt in tokens."""
        tokenizer = self.worker.models.tokenizer
        if completion.prompt is None:
            return encode_chat(tokenizer, completion)
        if isinstance(completion.prompt, str):
            return encode_prompt(tokenizer, completion.prompt)
        if max(completion.prompt) >= self.worker.vocabulary:
            raise ApiError(400, f"token {max(completion.prompt)} is not one of {self.worker.vocabulary:,}", "prompt")
        return list(completion.prompt)

    def _job(self, completion: CompletionRequest, tokens: list[int], since: float) -> Job:
        param, context = "messages" if completion.chat else "prompt", self.worker.context
        if not tokens:
            raise ApiError(400, "the prompt is empty: send at least one token", param)
        most = min((n for n in (self.limits.prompt_tokens, context and context - 1) if n is not None), default=None)
        if most is not None and len(tokens) > most:
            raise ApiError(
                400, f"the prompt has {len(tokens):,} tokens, and {most:,} are the most here: shorten it", param,
                "context_length_exceeded",
            )  # fmt: skip
        max_tokens = self.limits.max_tokens if completion.max_tokens is None else completion.max_tokens
        max_tokens = max_tokens if context is None else min(max_tokens, context - len(tokens))
        stop_strings = StopStrings(completion.stop_strings)
        return Job(
            tokens, max_tokens, completion.temperature, completion.top_p, completion.seed, stop_strings, since=since
        )

    # --- what else there is ---------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["name"] != self.name:
            raise ApiError(404, "there is no such model here", "model", "model_not_found")
        return JSONResponse(self._description)

    @property
    def _description(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": int(self._created), "owned_by": "mlx-kv"}

    async def _health(self, request: Request) -> Response:
        if not self.worker.alive:
            return JSONResponse({"status": "failed", "reason": self.worker.failure}, 503)
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        set_gauges(self.metrics, self.worker.snapshot, self.admission)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _page(self, request: Request) -> Response:
        headers = {"Content-Security-Policy": PAGE_MAY, "Cache-Control": "no-store", "X-Frame-Options": "DENY"}
        return Response(PAGE.read_bytes(), media_type="text/html", headers=headers)

    async def _memory(self, request: Request) -> Response:
        """What the page shows."""
        report = memory_report(self.worker, self.admission, self.metrics) | {
            "seconds": round(time.time() - self._created, 1),
        }
        return JSONResponse(report, headers={"Cache-Control": "no-store"})
