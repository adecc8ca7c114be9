"""HTTP: routes, limits and keys.

Decides what is answered with which status, and what a request may take of the server. Every error is an OpenAI-style
object. Knows nothing about MLX, nor how an answer comes about.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlx_kv.generation.encoding import encode_prompt
from mlx_kv.server.answers import AdmissionController, Answer
from mlx_kv.server.chat import encode_chat
from mlx_kv.server.clerk import Clerk, ClerkError
from mlx_kv.server.doors import Doors
from mlx_kv.server.job import Job
from mlx_kv.server.memory import Kept
from mlx_kv.server.metrics import Metrics
from mlx_kv.server.requests import ApiError, CompletionRequest, parse, read_json
from mlx_kv.server.text import Stops
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
        worker: started; pieces are taken from it as soon as the application starts.
        name: of the model, for clients.
        keys: any of which a client must send; none: all are let in.
        doors: by which names clients may come, and from pages of which sites; None are those of this machine.
    """

    def __init__(
        self,
        worker: Worker,
        metrics: Metrics,
        name: str,
        limits: Limits | None = None,
        keys: Sequence[str] = (),
        doors: Doors | None = None,
    ) -> None:
        self.worker, self.metrics, self.name, self.limits = worker, metrics, name, limits or Limits()
        self._keys = [key.encode() for key in keys]
        self.desk = AdmissionController(worker, metrics, name, worker.max_batch_size + self.limits.queue)
        self._begun = time.time()
        # One thread for tokenizers: they are fast, but a long prompt would hold up everybody else's tokens.
        self._encoding = Clerk("mlx-kv tokenizer")
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
            middleware=(doors or Doors()).middleware(self._refused),
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.desk.begin()
        watching = asyncio.create_task(self.desk.watch())
        yield
        watching.cancel()

    # --- keys and errors ------------------------------------------------------------------------------------------

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            if self._keys:
                kind, _, given = request.headers.get("authorization", "").partition(" ")
                found = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in self._keys]
                if kind.lower() != "bearer" or not any(found):
                    raise ApiError(
                        401, "no valid API key: send one as Authorization: Bearer KEY", None, "invalid_api_key",
                        {"WWW-Authenticate": "Bearer"},
                    )  # fmt: skip
            return await endpoint(request)

        return checked

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self.desk.count(request.url.path, error.status)
        return JSONResponse(error.body, error.status, error.headers)

    async def _not_found(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = {404: f"there is no {request.url.path[:200]}", 405: f"{request.method} is not allowed here"}
        told = ApiError(
            error.status_code, known.get(error.status_code, error.detail), headers=dict(error.headers or {})
        )
        return await self._refused(request, told)

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
            asked = parse(await self._json(request), chat, self.limits.temperature)
        except ClientDisconnect:
            raise ApiError(499, "the client hung up") from None
        if asked.model not in (None, self.name):
            raise ApiError(
                404, f"there is no model {asked.model[:200]!r} here: use {self.name!r}", "model", "model_not_found"
            )
        self.desk.admit()
        try:
            tokens = await asyncio.wrap_future(self._encoding.submit(lambda: self._encode(asked)))
            return Answer(self.desk, asked, self._job(asked, tokens, since))
        except BaseException as error:
            self.desk.leave()
            if isinstance(error, ClerkError):
                raise ApiError(500, f"the server failed: {error}") from error
            raise

    async def _json(self, request: Request) -> Any:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which a page of another site cannot send unasked
            raise ApiError(415, "send the body as Content-Type: application/json")
        limit, body = self.limits.body_bytes, bytearray()
        length = request.headers.get("content-length", "")
        read = int(length) if length.isdecimal() and len(length) < 20 else 0
        read = 0 if read <= 8 * limit else read  # hopeless: not even listened to
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                if read == 0:
                    # A client that still sends does not hear the answer, so some of what is too much is taken, and
                    # thrown away.
                    async for chunk in request.stream():
                        read += len(chunk)
                        if read <= limit:
                            body += chunk
                        elif read > 8 * limit:
                            break
        except TimeoutError:
            raise ApiError(408, f"the body took more than {self.limits.body_seconds:g} seconds") from None
        if read > limit:
            raise ApiError(
                413, f"the body has more than {limit:,} bytes: send less", None, "request_too_large",
                {"Connection": "close"},
            )  # fmt: skip
        try:
            return read_json(bytes(body))
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON: {error}"[:200], None, "invalid_json") from None

    def _encode(self, asked: CompletionRequest) -> list[int]:
        """The prompt in tokens."""
        tokenizer = self.worker.models.tokenizer
        if asked.prompt is None:
            return encode_chat(tokenizer, asked)
        if isinstance(asked.prompt, str):
            return encode_prompt(tokenizer, asked.prompt)
        if max(asked.prompt) >= self.worker.vocabulary:
            raise ApiError(400, f"token {max(asked.prompt)} is not one of {self.worker.vocabulary:,}", "prompt")
        return list(asked.prompt)

    def _job(self, asked: CompletionRequest, tokens: list[int], since: float) -> Job:
        param, context = "messages" if asked.chat else "prompt", self.worker.context
        if not tokens:
            raise ApiError(400, "the prompt is empty: send at least one token", param)
        most = min((n for n in (self.limits.prompt_tokens, context and context - 1) if n is not None), default=None)
        if most is not None and len(tokens) > most:
            raise ApiError(
                400, f"the prompt has {len(tokens):,} tokens, and {most:,} are the most here: shorten it", param,
                "context_length_exceeded",
            )  # fmt: skip
        wanted = self.limits.max_tokens if asked.max_tokens is None else asked.max_tokens
        wanted = wanted if context is None else min(wanted, context - len(tokens))
        stops = Stops(asked.stops)
        return Job(tokens, wanted, asked.temperature, asked.top_p, asked.seed, stops, since=since)

    # --- what else there is ---------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["name"] != self.name:
            raise ApiError(404, "there is no such model here", "model", "model_not_found")
        return JSONResponse(self._description)

    @property
    def _description(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": int(self._begun), "owned_by": "mlx-kv"}

    async def _health(self, request: Request) -> Response:
        if not self.worker.alive:
            return JSONResponse({"status": "failed", "reason": self.worker.failure}, 503)
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        seen, metrics = self.worker.snapshot, self.metrics
        rows = sum(job.joined for job in self.desk.jobs)
        metrics.rows.set(rows)
        metrics.waiting.set(self.desk.admitted - rows)
        metrics.tokens_per_second.set(seen.tokens_per_second)
        metrics.bytes_live.set(seen.memory.bytes_live)
        metrics.bytes_allocated.set(seen.memory.bytes_allocated)
        metrics.bytes_full.set(seen.memory.bytes_full)
        metrics.active_memory.set(seen.active_memory)
        metrics.prompt_memory.set(seen.prompt_memory)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    async def _page(self, request: Request) -> Response:
        headers = {"Content-Security-Policy": PAGE_MAY, "Cache-Control": "no-store", "X-Frame-Options": "DENY"}
        return Response(PAGE.read_bytes(), media_type="text/html", headers=headers)

    async def _memory(self, request: Request) -> Response:
        """What the page shows."""
        seen = self.worker.watch()
        memory = seen.memory
        shown = dict(zip(seen.decoding, zip(seen.generated, memory.rows, strict=False), strict=False))
        # All that is not answered yet, of which the snapshot may know nothing: it is up to a quarter of a second old.
        jobs = self.desk.jobs
        rows = [_row(job, *shown.get(job, (len(job.answer), ()))) for job in jobs]
        waiting = self.desk.admitted - sum(job.joined for job in jobs)
        names = ("generated_tokens", "tokens_evicted", "prefix_hits", "prefix_misses")
        told: dict[str, Any] = {name: self.metrics.total(name) for name in names}
        told |= {"model": self.name, "max_batch_size": self.worker.max_batch_size, "rows": rows}
        told |= {"waiting": waiting, "in_flight": self.desk.admitted}
        told |= {"tokens_per_second": round(seen.tokens_per_second, 1)}
        told |= {"bytes_live": memory.bytes_live, "bytes_allocated": memory.bytes_allocated}
        told |= {"bytes_full": memory.bytes_full, "active_memory": seen.active_memory}
        told |= {"seconds": round(time.time() - self._begun, 1), "keeps_prompts": self.worker.keeps_prompts}
        told |= {"prompt_memory": seen.prompt_memory}
        return JSONResponse(told, headers={"Cache-Control": "no-store"})


def _row(job: Job, generated: int, layers: Sequence[Kept]) -> dict[str, Any]:
    return {
        "number": job.number,
        "state": "decoding" if job.answer else "reading" if job.joined else "waiting",
        "prompt_tokens": len(job.tokens),
        "cached_tokens": job.cached,
        "generated_tokens": generated,
        "seconds": round(time.monotonic() - job.since, 1),
        "layers": [asdict(kept) | {"evicted": kept.evicted} for kept in layers],
    }
