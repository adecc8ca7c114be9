"""The HTTP application: routes, API keys, and errors as each path's clients read them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_kv.server.access import AccessRules, ApiKeys, Certificates
from mlx_kv.server.admission import (
    CHATS,
    COMPLETIONS,
    MESSAGES,
    OLLAMA_CHATS,
    OLLAMA_PROMPTS,
    RESPONSES,
    AdmissionController,
)
from mlx_kv.server.dialects.completions import chats, completions
from mlx_kv.server.dialects.messages import counted, messages
from mlx_kv.server.dialects.ollama import OllamaDialect, OllamaRoutes
from mlx_kv.server.dialects.responses import Conversations, ResponsesDialect
from mlx_kv.server.handler import Dialect, RequestHandler
from mlx_kv.server.json_http import ApiError, JsonResponse, error_body
from mlx_kv.server.models import ModelNames
from mlx_kv.server.requests import Limits as Limits
from mlx_kv.server.status import StatusRoutes
from mlx_kv.server.worker import Worker

log = logging.getLogger("mlx_kv.server")
Endpoint = Callable[[Request], Awaitable[Response]]
# First parts of paths of earlier versions, with the way on.
REMOVED = {
    "slots": "slots were removed in 0.4: prompts are cached without them; --prompt-store DIR keeps them for restarts",
}


@dataclass(frozen=True)
class HttpSettings:
    """Settings of the HTTP server.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        limits: of requests.
        keys: API keys, one of which each request must carry; empty disables the check.
        access: allowed host names and origins; None allows the names of `host`.
        certificates: for TLS; None is without.
        aliases: more names of the model; "*" allows any.
        drain_seconds: from a signal until responses in progress are ended with an error.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    limits: Limits = field(default_factory=Limits)
    keys: Sequence[str] = ()
    access: AccessRules | None = None
    certificates: Certificates | None = None
    aliases: Sequence[str] = ()
    drain_seconds: float = 30.0


class Api:
    """The Starlette application, as `app`.

    Args:
        worker: started; its output is delivered once the application starts.
        name: of the model, for clients.
    """

    def __init__(self, worker: Worker, name: str, settings: HttpSettings | None = None) -> None:
        settings = settings or HttpSettings()
        self.worker, self.metrics, self.limits = worker, worker.metrics, settings.limits
        worker.monitor.prefixes.allows_text = len(settings.keys) <= 1  # else texts would reach users with other keys
        self._keys, self.names = ApiKeys(settings.keys), ModelNames(name, settings.aliases)
        self.admission = AdmissionController(worker, worker.settings.max_batch_size + self.limits.queue)
        self._handler = RequestHandler(worker, self.admission, self.limits, self.names)
        self._status, self._conversations = StatusRoutes(worker, self.admission, self.names), Conversations()
        guarded, status = self._guarded, self._status
        ollama = OllamaDialect(self.names, worker.models.tokenizer.has_chat_template)
        models = OllamaRoutes(worker, self.names, self.limits)
        self.app = Starlette(
            routes=[
                *self._answers(COMPLETIONS, completions),
                *self._answers(CHATS, chats),
                *self._answers(RESPONSES, ResponsesDialect(self._conversations)),
                *self._answers(MESSAGES, messages),
                *self._answers(OLLAMA_CHATS, ollama.chat),
                *self._answers(OLLAMA_PROMPTS, ollama.generate),
                Route("/api/tags", guarded(models.tags)),
                Route("/api/ps", guarded(models.running)),
                Route("/api/show", guarded(models.show), methods=["POST"]),
                Route("/api/version", guarded(models.version)),
                Route("/api/embed", guarded(self._embeddings), methods=["POST"]),
                Route("/v1/responses/{name}", guarded(self._response), methods=["GET", "DELETE"]),
                Route("/v1/messages/count_tokens", guarded(self._count), methods=["POST"]),
                Route("/v1/embeddings", guarded(self._embeddings), methods=["POST"]),
                Route("/v1/models", guarded(status.models)),
                Route("/models", guarded(status.models)),
                Route("/v1/models/{name:path}", guarded(status.model)),
                Route("/metrics", guarded(status.metrics)),
                Route("/memory", guarded(status.memory)),
                Route("/health", status.health),
                Route("/ready", status.ready),
                Route("/", status.page),
                Route("/chat", status.chat_page),
            ],
            exception_handlers={ApiError: self._refused, HTTPException: self._not_found, Exception: self._failed},
            middleware=(settings.access or AccessRules(settings.host)).middleware(self._refused),
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.admission.begin()
        yield
        self._handler.close()

    # --- endpoints ------------------------------------------------------------------------------------------------

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        """An endpoint that requires an API key, if there are any."""

        async def checked(request: Request) -> Response:
            self._keys.check(request.headers)
            return await endpoint(request)

        return checked

    def _answers(self, paths: Sequence[str], dialect: Dialect) -> list[Route]:
        """Routes to generated answers, for the requests of a dialect."""

        async def answer(request: Request) -> Response:
            return await self._handler.answer(request, dialect)

        return [Route(path, self._guarded(answer), methods=["POST"]) for path in paths]

    async def _response(self, request: Request) -> Response:
        """A stored response."""
        name = request.path_params["name"]
        if request.method == "DELETE":
            self._conversations.remove(name)
            return JsonResponse({"id": name, "object": "response", "deleted": True})
        return JsonResponse(self._conversations.find(name).response)

    async def _count(self, request: Request) -> Response:
        return JsonResponse({"input_tokens": await self._handler.count(request, counted)})

    async def _embeddings(self, request: Request) -> Response:
        message = f"{self.names.name!r} generates text and has no embeddings: use a server of an embedding model"
        raise ApiError(404, message)

    # --- errors ---------------------------------------------------------------------------------------------------

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self.admission.count(request.url.path, error.status)
        return JsonResponse(error_body(error, request.url.path), error.status, error.headers)

    async def _not_found(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        missing = REMOVED.get(path.split("/")[1], f"there is no {path[:200]}")
        reasons = {404: missing, 405: f"{request.method} is not allowed here"}
        message = reasons.get(error.status_code, error.detail)
        return await self._refused(request, ApiError(error.status_code, message, headers=dict(error.headers or {})))

    async def _failed(self, request: Request, error: Exception) -> Response:
        log.error("a request to %s could not be answered", request.url.path[:200], exc_info=error)
        return await self._refused(request, ApiError(500, "the server failed: see its log"))
