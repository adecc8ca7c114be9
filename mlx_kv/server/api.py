"""The HTTP application: routes, access (host names, origins, API keys, TLS certificates), errors, and pages.

A page of any site can make a browser send requests to this machine: under a host name of its own that it points here
(DNS rebinding), or directly where the page needs no answer. So the Host header must name this server, and an Origin
header must be the server's own or an allowed one. Programs send no Origin.

Starlette's CORSMiddleware answers preflights. Its TrustedHostMiddleware is not used: it has no rule for "any IP
address", which a server that listens on 0.0.0.0 needs, no origins, and refuses with plain text and status 400.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_kv.generation.images import reads_images
from mlx_kv.generation.statistics import SpeculationStatistics
from mlx_kv.server.dialects.completions import chats, completions
from mlx_kv.server.dialects.embeddings import embeddings, ollama_embed
from mlx_kv.server.dialects.messages import messages, token_count_request
from mlx_kv.server.dialects.ollama import GenerateBody, OllamaChatBody, OllamaDialect, OllamaRoutes
from mlx_kv.server.dialects.responses import Conversations, ResponsesDialect
from mlx_kv.server.handler import (
    CHATS,
    COMPLETIONS,
    HEADER,
    MESSAGES,
    OLLAMA_CHATS,
    OLLAMA_PROMPTS,
    REQUEST_ID,
    RESPONSES,
    AdmissionController,
    Dialect,
    RequestHandler,
)
from mlx_kv.server.json_http import ApiError, JsonResponse, error_body, read_body
from mlx_kv.server.memory import RowOccupancy
from mlx_kv.server.monitor import Snapshot
from mlx_kv.server.output import Job
from mlx_kv.server.requests import Body, UnknownFields
from mlx_kv.server.requests import Limits as Limits
from mlx_kv.server.rows import policy_name
from mlx_kv.server.served import ANY, ModelTable, Served
from mlx_kv.server.worker import Worker

HOST_NAME = re.compile(r"\*|(\*\.)?[^\s*/:?#@\\\[\]]+")
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@]+", re.IGNORECASE)
DEFAULT_PORT = re.compile(r"http://.*:80|https://.*:443", re.IGNORECASE)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
PAGE = Path(__file__).with_name("page.html")  # shows /memory
CHAT_PAGE = Path(__file__).with_name("chat.html")  # a chat in the browser, through /v1/chat/completions
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
COUNTERS = ("generated_tokens", "tokens_evicted", "prefix_hits", "prefix_misses", "preemptions")
MAX_PATH = 200  # characters of a path in the access log
ErrorResponse = Callable[[Request, ApiError], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]
log = logging.getLogger("mlx_kv.server")


# --- host names and origins -------------------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


class AccessRules:
    """Allowed host names and origins.

    Args:
        host: the address to listen on, which is an allowed name. Where it is all addresses of this machine (0.0.0.0 or
            ::), any IP address is allowed (no site can have one as its name), and the name of this machine.
        hosts: names allowed besides that and the loopback names; "*" allows all, "*.example.com" its subdomains.
        origins: sites with access, as "https://example.com"; "*" in one stands for any letters, and alone allows all.

    Raises:
        ValueError: a name or origin that no browser could send.
    """

    def __init__(self, host: str = "127.0.0.1", hosts: Sequence[str] = (), origins: Sequence[str] = ()) -> None:
        address = _address(host)
        self._any_address = address is not None and address.is_unspecified
        server_names = [socket.gethostname(), f"{socket.gethostname()}.local"] if self._any_address else [host]
        names = [name.lower() if _address(name.strip("[]")) is None else name.strip("[]") for name in hosts]
        for name in names:
            if _address(name) is None and not HOST_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not a host name: write it without scheme and port, as in mac.lan or *.lan"
                )
        for origin in origins:
            if not ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin: write scheme and host, as in https://example.com")
            if DEFAULT_PORT.fullmatch(origin):
                raise ValueError(f"{origin!r} has its scheme's port, which browsers leave out: leave it out")
        self._hosts = list(dict.fromkeys((*LOOPBACK, *[name.lower() for name in server_names], *names)))
        patterns = [re.escape(origin).replace(r"\*", "[^/@]*") for origin in origins]
        self._origins = re.compile("|".join(patterns), re.IGNORECASE) if patterns else None

    @property
    def allowed_names(self) -> str:
        """The allowed host names, for messages."""
        if ANY in self._hosts:
            return "any name"
        return ", ".join((["any IP address"] if self._any_address else []) + self._hosts)

    def middleware(self, error_response: ErrorResponse) -> list[Middleware]:
        """Middleware of a Starlette application, outermost first.

        Args:
            error_response: makes the response to a request without access.
        """

        def with_access(app: ASGIApp) -> ASGIApp:
            async def check(scope: Scope, receive: Receive, send: Send) -> None:
                if scope["type"] == "http":
                    try:
                        self.check(Headers(scope=scope))
                    except ApiError as error:
                        await (await error_response(Request(scope), error))(scope, receive, send)
                        return
                await app(scope, receive, send)

            return check

        if self._origins is None:
            return [Middleware(with_access)]
        options: Any = {
            "allow_methods": ["GET", "POST", "DELETE"],
            "allow_headers": ["*"],
            "expose_headers": [HEADER, REQUEST_ID],
        }
        options |= {"allow_origin_regex": self._origins, "allow_private_network": True}
        return [Middleware(with_access), Middleware(CORSMiddleware, **options)]

    def check(self, headers: Headers) -> None:
        """Raises ApiError, 403, for another host name or a page of another site."""
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _name(host)
        if not (
            {ANY, name} & set(self._hosts)
            or (self._any_address and _address(name) is not None)
            or any(host.startswith("*.") and name.endswith(host[1:]) for host in self._hosts)
        ):
            raise ApiError(
                403, f"{host[:200]!r} is not a name of this server: start it with --allowed-hosts NAME, or use one of "
                f"these: {self.allowed_names}", None, "host_not_allowed",
            )  # fmt: skip
        same_site = origin is not None and origin.lower().partition("://")[2] == host.lower()
        listed = self._origins is not None and origin is not None and self._origins.fullmatch(origin)
        if origin is not None and not same_site and not listed:
            raise ApiError(
                403, f"pages of {origin[:200]!r} may not use this server: start it with --allowed-origins ORIGIN", None,
                "origin_not_allowed",
            )  # fmt: skip


def _name(host: str) -> str:
    """The name in a Host header, without port and brackets; empty if it has none."""
    try:
        return urlsplit(f"//{host}").hostname or "" if not set(host) & set("/?#@\\ ") else ""
    except ValueError:
        return ""


# --- API keys and certificates ----------------------------------------------------------------------------------------


class ApiKeys:
    """The API keys, one of which each request must carry; an empty list disables the check."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, headers: Headers) -> None:
        """Raises ApiError, 401, for a request without a valid key. The comparison takes constant time."""
        if not self._keys:
            return
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        values = (bearer if kind.lower() == "bearer" else "", headers.get("x-api-key", ""))  # the second: Anthropic's
        sent = [value.strip().encode("latin-1") for value in values]
        matches = [hmac.compare_digest(value, key) for value in sent for key in self._keys]
        if not any(matches):
            raise ApiError(
                401, "no valid API key: send one as Authorization: Bearer KEY", None, "invalid_api_key",
                {"WWW-Authenticate": "Bearer"},
            )  # fmt: skip


@dataclass(frozen=True)
class Certificates:
    """PEM files for TLS, named as uvicorn's settings. Checked when made, so that errors come before a model is loaded.

    Attributes:
        ssl_certfile: the server's certificate, and intermediate ones.
        ssl_keyfile: its private key; None if it is in the same file.
        ssl_keyfile_password: of the private key, if it is encrypted.
        ssl_ca_certs: authorities, one of which must have signed the clients' certificates; None requires none.

    Raises:
        ValueError: a file can't be read, or certificate and key don't match.
    """

    ssl_certfile: Path
    ssl_keyfile: Path | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: Path | None = None

    def __post_init__(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password OpenSSL would read one from the terminal.
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, lambda: self.ssl_keyfile_password or "")
        except (OSError, ValueError) as error:
            key = self.ssl_keyfile or self.ssl_certfile
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise ValueError(
                f"cannot use the certificate {self.ssl_certfile} with the key in {key}: {reason}; both are PEM files"
            ) from error
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except OSError as error:
                raise ValueError(
                    f"cannot use the certificates in {self.ssl_ca_certs}: they are not a PEM file"
                ) from error

    @property
    def uvicorn_options(self) -> dict[str, Any]:
        """Keyword arguments of `uvicorn.Config`."""
        options: dict[str, Any] = {name: str(value) for name, value in vars(self).items() if value is not None}
        return options | ({"ssl_cert_reqs": ssl.CERT_REQUIRED} if self.ssl_ca_certs is not None else {})


# --- logging ----------------------------------------------------------------------------------------------------------


def configure_logging(level: str) -> None:
    """Logs messages of this level and above to stderr, with the time; of other libraries warnings and errors only."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]  # without one, `logging.warning` of any library would add its own
    root.setLevel("WARNING" if level in ("DEBUG", "INFO") else level)
    logging.getLogger("mlx_kv").setLevel(level)
    logging.getLogger("uvicorn").setLevel("WARNING" if level == "INFO" else level)
    logging.getLogger("uvicorn.access").setLevel(level)
    logging.getLogger("uvicorn.access").addFilter(_without_query)


def _without_query(record: logging.LogRecord) -> bool:
    """Removes the query string of a request from the access log, since it may have a key."""
    if isinstance(record.args, tuple) and len(record.args) == 5:
        client, method, path, *rest = record.args
        record.args = (client, method, str(path).partition("?")[0][:MAX_PATH], *rest)
    return True


# --- pages, metrics and health ----------------------------------------------------------------------------------------


class ModelBody(Body):
    """A request to load or unload a model."""

    model: str


class StatusRoutes:
    """Endpoints that generate nothing."""

    def __init__(self, worker: Worker, admission: AdmissionController, table: ModelTable) -> None:
        self._worker, self._admission, self._table = worker, admission, table
        self._created = time.time()

    # --- models ---------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """All names of the models."""
        names = [(served, name) for served in self._worker.served for name in served.names.all]
        data = {"object": "list", "data": [self._description(*each) for each in names], "has_more": False}
        return JsonResponse(data | {"first_id": names[0][1], "last_id": names[-1][1]})

    async def model(self, request: Request) -> Response:
        """One name of a model."""
        name = request.path_params["name"]
        if (served := self._table.known(name)) is None:
            raise ApiError(404, "there is no such model here", "model", "model_not_found")
        return JsonResponse(self._description(served, name))

    def _description(self, served: Served, name: str) -> dict[str, Any]:
        """With the fields of OpenAI's API, and those of Anthropic's."""
        created = int(self._created)
        openai = {"id": name, "object": "model", "created": created, "owned_by": "mlx-kv"}
        since = datetime.fromtimestamp(created, UTC).isoformat()
        anthropic = {"type": "model", "display_name": served.names.name, "created_at": since}
        own = {"sampling": served.models.sampling.changed, **_state(served)}
        return openai | own | anthropic

    # --- health ---------------------------------------------------------------------------------------------------

    async def ready(self, request: Request) -> Response:
        """Whether requests are admitted."""
        alive = self._worker.alive
        reason = self._admission.closing if alive else self._worker.failure
        if reason is not None or not alive:
            return JsonResponse({"status": "not ready", "reason": reason}, 503)
        return JsonResponse({"status": "ready"})

    async def health(self, request: Request) -> Response:
        """Whether the worker is alive."""
        if not self._worker.alive:
            return JsonResponse({"status": "failed", "reason": self._worker.failure}, 503)
        return JsonResponse({"status": "ok"})

    # --- memory ---------------------------------------------------------------------------------------------------

    def _gauges(self, snapshot: Snapshot) -> dict[str, float]:
        """The gauges of /memory and /metrics, by their names in both."""
        occupancy = snapshot.occupancy
        return {
            "waiting": self._admission.admitted - sum(job.has_row for job in self._admission.jobs),
            "tokens_per_second": round(snapshot.tokens_per_second, 1),
            "bytes_live": occupancy.bytes_live,
            "bytes_allocated": occupancy.bytes_allocated,
            "bytes_full": occupancy.bytes_full,
            "bytes_planned": snapshot.planned,
            "active_memory": snapshot.active_memory,
            "prompt_memory": snapshot.prompt_memory,
            "freed_memory": snapshot.freed_memory,
        }

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics; the gauges are set from the newest snapshot."""
        snapshot, metrics = self._worker.monitor.snapshot, self._worker.metrics
        for name, value in self._gauges(snapshot).items():
            getattr(metrics, name).set(value)
        metrics.rows.set(sum(job.has_row for job in self._admission.jobs))
        metrics.memory_limit.set(self._worker.limit.limit or 0)
        metrics.policies.set(len(self._worker.policies))
        for served in self._worker.served:
            name = served.names.name
            metrics.model_loaded.labels(name).set(served.state == "loaded")
            metrics.model_weights.labels(name).set(served.nbytes)
            metrics.model_rows.labels(name).set(len(served.rows.active))
        if snapshot.speculation is not None:
            metrics.draft_length.set(snapshot.speculation.length)
            metrics.draft_tokens_per_pass.set(snapshot.speculation.tokens_per_pass)
            metrics.draft_gain.set(snapshot.speculation.gain or 0)
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    async def memory(self, request: Request) -> Response:
        """Memory by request and in total, as JSON.

        A snapshot is up to a quarter of a second old; requests admitted since are included. For some seconds from now,
        snapshots contain the positions of rows.
        """
        worker, admission = self._worker, self._admission
        snapshot, jobs, metrics = worker.monitor.watch(), admission.jobs, worker.metrics
        occupancy, drafts = snapshot.occupancy, snapshot.speculation
        counts = zip((*snapshot.generated, *[0] * len(snapshot.reading)), occupancy.rows, strict=False)
        occupied = dict(zip((*snapshot.decoding, *snapshot.reading), counts, strict=False))
        report = {
            **{name: metrics.total(name) for name in COUNTERS},
            "model": worker.default.names.name,
            "models": [{"name": served.names.name, **_state(served), **_usage(served)} for served in worker.served],
            "max_batch_size": worker.settings.max_batch_size,
            "rows": [_row(job, drafts, *occupied.get(job, (len(job.answer), ()))) for job in jobs],
            **self._gauges(snapshot),
            "in_flight": admission.admitted,
            "history": worker.monitor.history.figures(time.monotonic()),
            "memory_limit": worker.limit.limit,
            "freed_memory_limit": worker.freed_limit,
            "weights": worker.limit.weights,
            "prompt_memory_limit": worker.prompt_bytes,
            "prompt_memory_tokens": worker.default.plan.tokens_in(worker.prompt_bytes),
            "policies": [
                {"policy": policy_name(policy), "rows": sum(job.has_row for job in jobs if job.served.policy == policy)}
                for policy in worker.policies
            ],
            "keeps_prompts": worker.settings.keeps_prompts,
            "prefixes": list(worker.monitor.prefixes.reports),
            "drafts": None if drafts is None else drafts.figures(),
            "seconds": round(time.time() - self._created, 1),
        }
        return JsonResponse(report, headers={"Cache-Control": "no-store"})


def html_page(path: Path) -> Endpoint:
    """The endpoint of a page."""

    async def page(request: Request) -> Response:
        headers = {"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-store", "X-Frame-Options": "DENY"}
        return Response(path.read_bytes(), media_type="text/html", headers=headers)

    return page


def _state(served: Served) -> dict[str, Any]:
    """What is known of a model, and whether its weights are in memory."""
    known = {"state": served.state, "bytes": served.nbytes, "context_length": served.context, "pinned": served.pinned}
    return known | {"images": reads_images(served.models.model)}


def _usage(served: Served) -> dict[str, Any]:
    """What requests to a model hold."""
    rows, until = served.rows, served.expires_at
    return {
        "policy": policy_name(served.policy),
        "rows": len(rows.active),
        "prompt_memory": int(rows.prefixes.memory.nbytes),
        "seconds_left": None if until is None else round(until - time.time(), 1),
    }


def _row(
    job: Job,
    drafts: SpeculationStatistics | None,
    generated: int,
    layers: Sequence[RowOccupancy],
) -> dict[str, Any]:
    return {
        "number": job.number,
        "model": job.served.names.name,
        "policy": policy_name(job.served.policy),
        "state": "decoding" if generated else "reading" if job.has_row else "waiting",
        "prompt_tokens": len(job.tokens),
        "cached_tokens": job.cached,
        "read_tokens": len(job.tokens) if generated else max(job.read, job.cached),
        "drafts": None if drafts is None else _row_drafts(job, drafts),
        "generated_tokens": generated,
        "seconds": round(time.monotonic() - job.since, 1),
        "layers": [asdict(layer) | {"evicted": layer.evicted} for layer in layers],
    }


def _row_drafts(job: Job, total: SpeculationStatistics) -> dict[str, float | int | None]:
    """Drafts of one row. A pass takes equally long for all rows, so a row gains by its tokens per pass."""
    per_pass = len(job.answer) / max(1, len(job.answer) - job.accepted)
    gain = None
    if total.gain is not None and total.tokens_per_pass:
        gain = total.gain * per_pass / total.tokens_per_pass
    return {
        "draft_length": job.drafted,
        "accepted": job.accepted,
        "tokens_per_pass": round(per_pass, 2),
        "draft_gain": None if gain is None else round(gain, 2),
    }


# --- the application --------------------------------------------------------------------------------------------------

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
        strict_names: whether names of other models are refused, if there is one model.
        drain_seconds: from a signal until responses in progress are ended with an error.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    limits: Limits = field(default_factory=Limits)
    keys: Sequence[str] = ()
    access: AccessRules | None = None
    certificates: Certificates | None = None
    drain_seconds: float = 30.0
    strict_names: bool = False


class Api:
    """The Starlette application, as `app`.

    Args:
        worker: started; its output is delivered once the application starts.
    """

    def __init__(self, worker: Worker, settings: HttpSettings | None = None) -> None:
        settings = settings or HttpSettings()
        self.worker, self.limits = worker, settings.limits
        if any(reads_images(served.models.model) for served in worker.served):
            self.limits = replace(self.limits, body_bytes=self.limits.image_body_bytes)
        worker.monitor.prefixes.allows_text = len(settings.keys) <= 1  # else texts would reach users with other keys
        self._keys, self.table = ApiKeys(settings.keys), ModelTable(worker.served, settings.strict_names)
        self.admission = AdmissionController(
            worker, worker.settings.max_batch_size + self.limits.queue, self.limits.answers
        )
        self._handler = RequestHandler(worker, self.admission, self.limits, self.table)
        self._conversations = Conversations()
        guarded, status = self._guarded, StatusRoutes(worker, self.admission, self.table)
        models = OllamaRoutes(worker, self.table, self.limits)
        self.app = Starlette(
            routes=[
                *self._generation_routes(COMPLETIONS, completions),
                *self._generation_routes(CHATS, chats),
                *self._generation_routes(RESPONSES, ResponsesDialect(self._conversations)),
                *self._generation_routes(MESSAGES, messages),
                *self._generation_routes(OLLAMA_CHATS, OllamaDialect(OllamaChatBody, self.table)),
                *self._generation_routes(OLLAMA_PROMPTS, OllamaDialect(GenerateBody, self.table)),
                Route("/api/tags", guarded(models.tags)),
                Route("/api/ps", guarded(models.running)),
                Route("/api/show", guarded(models.show), methods=["POST"]),
                Route("/api/version", guarded(models.version)),
                Route("/api/embed", guarded(partial(self._handler.embed, parse=ollama_embed)), methods=["POST"]),
                Route("/v1/responses/{name}", guarded(self._response), methods=["GET", "DELETE"]),
                Route("/v1/messages/count_tokens", guarded(self._count), methods=["POST"]),
                Route("/v1/embeddings", guarded(partial(self._handler.embed, parse=embeddings)), methods=["POST"]),
                Route("/v1/models", guarded(status.models)),
                Route("/models", guarded(status.models)),
                Route("/models/load", guarded(partial(self._load, keep_alive=None)), methods=["POST"]),
                Route("/models/unload", guarded(partial(self._load, keep_alive=0.0)), methods=["POST"]),
                Route("/v1/models/{name:path}", guarded(status.model)),
                Route("/metrics", guarded(status.metrics)),
                Route("/memory", guarded(status.memory)),
                Route("/health", status.health),
                Route("/ready", status.ready),
                Route("/", html_page(PAGE)),
                Route("/chat", html_page(CHAT_PAGE)),
            ],
            exception_handlers={
                ApiError: self._error_response,
                HTTPException: self._http_error,
                Exception: self._server_error,
            },
            middleware=(settings.access or AccessRules(settings.host)).middleware(self._error_response),
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

        async def with_key(request: Request) -> Response:
            self._keys.check(request.headers)
            return await endpoint(request)

        return with_key

    def _generation_routes(self, paths: Sequence[str], dialect: Dialect) -> list[Route]:
        """Routes to generated answers, for the requests of a dialect."""

        answer = self._guarded(partial(self._handler.answer, dialect=dialect))
        return [Route(path, answer, methods=["POST"]) for path in paths]

    async def _response(self, request: Request) -> Response:
        """A stored response."""
        name = request.path_params["name"]
        if request.method == "DELETE":
            self._conversations.remove(name)
            return JsonResponse({"id": name, "object": "response", "deleted": True})
        return JsonResponse(self._conversations.find(name).response)

    async def _count(self, request: Request) -> Response:
        return JsonResponse({"input_tokens": await self._handler.count(request, token_count_request)})

    async def _load(self, request: Request, keep_alive: float | None) -> Response:
        """Loads or unloads a model, as llama-server's router does."""
        body = ModelBody.parse(
            await read_body(request, self.limits.body_bytes, self.limits.body_seconds),
            UnknownFields(self.limits.strict),
        )
        await self._handler.load(self.table.find(body.model), keep_alive)
        return JsonResponse({"success": True})

    # --- errors ---------------------------------------------------------------------------------------------------

    async def _error_response(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self.admission.count(request.url.path, error.status)
        return JsonResponse(error_body(error, request.url.path), error.status, error.headers)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        not_found = REMOVED.get(path.split("/")[1], f"there is no {path[:200]}")
        reasons = {404: not_found, 405: f"{request.method} is not allowed here"}
        message = reasons.get(error.status_code, error.detail)
        return await self._error_response(
            request, ApiError(error.status_code, message, headers=dict(error.headers or {}))
        )

    async def _server_error(self, request: Request, error: Exception) -> Response:
        log.error("a request to %s could not be answered", request.url.path[:200], exc_info=error)
        return await self._error_response(request, ApiError(500, "the server failed: see its log"))
