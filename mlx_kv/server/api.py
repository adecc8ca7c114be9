"""HTTP: routes and keys.

Decides which paths there are, and what is answered where nothing is generated. Every error is an object as the clients
of a path read it. Knows nothing about MLX, nor how an answer comes about.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_kv.server.access import AccessRules, ApiKeys
from mlx_kv.server.admission import CHATS, COMPLETIONS, MESSAGES, RESPONSES, AdmissionController
from mlx_kv.server.dialects.conversations import Conversations
from mlx_kv.server.dialects.message_requests import counted, messages
from mlx_kv.server.dialects.response_requests import ResponsesDialect
from mlx_kv.server.errors import ApiError, error_body
from mlx_kv.server.intake import Intake
from mlx_kv.server.limits import Limits as Limits
from mlx_kv.server.memory_report import memory_report, set_gauges
from mlx_kv.server.metrics import Metrics
from mlx_kv.server.names import ModelNames
from mlx_kv.server.rendering import JsonResponse
from mlx_kv.server.response_objects import chats, completions
from mlx_kv.server.slot_routes import SlotRoutes
from mlx_kv.server.worker import Worker

PAGE = Path(__file__).with_name("page.html")
PAGE_MAY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
log = logging.getLogger("mlx_kv.server")
Endpoint = Callable[[Request], Awaitable[Response]]


class Api:
    """The Starlette application, as `app`.

    Args:
        worker: started; its output is taken from it as soon as the application starts.
        name: of the model, for clients.
        keys: any of which a client must send; none: all are let in.
        access: by which names clients may come, and from pages of which sites; None are those of this machine.
        aliases: other names of the model; "*" are all.
    """

    def __init__(
        self,
        worker: Worker,
        metrics: Metrics,
        name: str,
        limits: Limits | None = None,
        keys: Sequence[str] = (),
        access: AccessRules | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        self.worker, self.metrics, self.name, self.limits = worker, metrics, name, limits or Limits()
        self._keys, self.names = ApiKeys(keys), ModelNames(name, aliases)
        self.admission = AdmissionController(worker, metrics, name, worker.max_batch_size + self.limits.queue)
        self._intake = Intake(worker, self.admission, self.limits, self.names)
        self._slots = SlotRoutes(worker, self.admission, self._intake, self.limits.slot_folder)
        self._conversations, self._created = Conversations(), time.time()
        guarded = self._guarded
        self.app = Starlette(
            routes=[
                *self._each(COMPLETIONS, self._completions),
                *self._each(CHATS, self._chat),
                *self._each(RESPONSES, self._respond),
                Route("/v1/responses/{name}", guarded(self._response), methods=["GET", "DELETE"]),
                *self._each(MESSAGES, self._message),
                *self._each(["/v1/messages/count_tokens"], self._count),
                Route("/slots", guarded(self._slots.list)),
                Route("/slots/{number}", guarded(self._slots.act), methods=["POST"]),
                Route("/v1/embeddings", guarded(self._embeddings), methods=["POST"]),
                Route("/v1/models", guarded(self._models)),
                Route("/models", guarded(self._models)),
                Route("/v1/models/{name:path}", guarded(self._model)),
                Route("/metrics", guarded(self._metrics)),
                Route("/memory", guarded(self._memory)),
                Route("/health", self._health),
                Route("/ready", self._ready),
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

    def _each(self, paths: Sequence[str], endpoint: Endpoint) -> list[Route]:
        return [Route(path, self._guarded(endpoint), methods=["POST"]) for path in paths]

    # --- keys and errors ------------------------------------------------------------------------------------------

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        async def checked(request: Request) -> Response:
            self._keys.check(request.headers)
            return await endpoint(request)

        return checked

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self.admission.count(request.url.path, error.status)
        return JsonResponse(error_body(error, request.url.path), error.status, error.headers)

    async def _not_found(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {404: f"there is no {request.url.path[:200]}", 405: f"{request.method} is not allowed here"}
        refusal = ApiError(
            error.status_code, messages.get(error.status_code, error.detail), headers=dict(error.headers or {})
        )
        return await self._refused(request, refusal)

    async def _failed(self, request: Request, error: Exception) -> Response:
        log.error("a request to %s could not be answered", request.url.path[:200], exc_info=error)
        return await self._refused(request, ApiError(500, "the server failed: see its log"))

    # --- answers --------------------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        return await self._intake.answer(request, completions)

    async def _chat(self, request: Request) -> Response:
        return await self._intake.answer(request, chats)

    async def _respond(self, request: Request) -> Response:
        return await self._intake.answer(request, ResponsesDialect(self._conversations))

    async def _response(self, request: Request) -> Response:
        """A response that was given before."""
        name = request.path_params["name"]
        if request.method == "DELETE":
            self._conversations.remove(name)
            return JsonResponse({"id": name, "object": "response", "deleted": True})
        return JsonResponse(self._conversations.find(name).response)

    async def _message(self, request: Request) -> Response:
        return await self._intake.answer(request, messages)

    async def _count(self, request: Request) -> Response:
        return JsonResponse({"input_tokens": await self._intake.count(request, counted)})

    async def _embeddings(self, request: Request) -> Response:
        raise ApiError(
            404, f"{self.name!r} continues texts and gives no embeddings: ask a server of an embedding model"
        )

    # --- what else there is ---------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        described = [self._description(name) for name in self.names.all]
        ends = {"first_id": self.names.all[0], "last_id": self.names.all[-1]}
        return JsonResponse({"object": "list", "data": described, "has_more": False} | ends)

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.names:
            raise ApiError(404, "there is no such model here", "model", "model_not_found")
        return JsonResponse(self._description(name))

    def _description(self, name: str) -> dict[str, Any]:
        """As OpenAI's clients read it, and as Anthropic's do."""
        since = datetime.fromtimestamp(int(self._created), UTC).isoformat()
        ours = {"id": name, "object": "model", "created": int(self._created), "owned_by": "mlx-kv"}
        ours["sampling"] = self.worker.models.sampling.changed
        return ours | {"type": "model", "display_name": self.name, "created_at": since}

    async def _ready(self, request: Request) -> Response:
        """Whether requests are taken."""
        reason = self.worker.failure if not self.worker.alive else self.admission.closing
        if reason is not None or not self.worker.alive:
            return JsonResponse({"status": "not ready", "reason": reason}, 503)
        return JsonResponse({"status": "ready"})

    async def _health(self, request: Request) -> Response:
        if not self.worker.alive:
            return JsonResponse({"status": "failed", "reason": self.worker.failure}, 503)
        return JsonResponse({"status": "ok"})

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
        return JsonResponse(report, headers={"Cache-Control": "no-store"})
