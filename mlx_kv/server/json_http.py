"""JSON over HTTP: strict JSON of request bodies, responses, server-sent events, and errors.

Errors are OpenAI's error objects, Anthropic's or Ollama's, with their HTTP status.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlx_kv.files.tensor_files import read_json

# --- errors -----------------------------------------------------------------------------------------------------------

MESSAGES, OLLAMA = "/v1/messages", "/api/"
T = TypeVar("T")
SHUTTING_DOWN = "the server is shutting down"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An error that is sent to the client.

    Args:
        param: the field of the request that is wrong.
        code: OpenAI's error code.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers or {}
        # They may quote the request, and JSON can have half a surrogate pair, which UTF-8 cannot.
        self.message, self.param = sendable(message), None if param is None else sendable(param)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def without_panic(task: str, function: Callable[[], T]) -> T:
    """Returns what a function returns, for functions that run in a thread for the event loop.

    Raises:
        ApiError: for an error that is no Exception, such as a panic in Rust: it would end the event loop.
    """
    try:
        return function()
    except Exception:
        raise
    except BaseException as error:
        raise ApiError(500, f"the server failed: {task} ended with {type(error).__name__}: {error}") from error


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """The error object in the form of the API that a path belongs to."""
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        return anthropic_error(error)
    if path.startswith(OLLAMA):
        return {"error": error.message}
    return error.body


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def sendable(text: str) -> str:
    """A text with question marks in place of halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode()


# --- bodies and responses ---------------------------------------------------------------------------------------------

MAX_IN_LOOP = 2**20  # bytes of a body that is parsed in the event loop
EVENT_STREAM = b"text/event-stream; charset=utf-8"


def json_bytes(data: Any) -> bytes:
    """JSON in UTF-8, with a question mark for each half of a surrogate pair, which requests can have.

    Raises:
        ValueError: a number that JSON does not have.
    """
    return json.dumps(data, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


class JsonResponse(Response):
    """A whole answer, rendered when it is made: a failure to do so happens before anything is sent."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def event(data: dict[str, Any], name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json_bytes(data) + b"\n\n"


async def read_body(request: Request, limit: int, seconds: float) -> Any:
    """The JSON of a request's body.

    Args:
        limit: bytes.
        seconds: in which all of it must arrive.

    Raises:
        ApiError: it is too large, too slow, of another type or no JSON; 499 if the client closed the connection.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Pages of other sites cannot send JSON without a preflight. Clients of Ollama leave the type out, and no page does.
    typed = "origin" in request.headers or not request.url.path.startswith("/api/")
    if kind != "application/json" and typed:
        raise ApiError(415, "send the body as Content-Type: application/json")
    body = bytearray()
    length = request.headers.get("content-length", "")
    read = int(length) if length.isdecimal() and len(length) < 20 else 0
    read = 0 if read <= 8 * limit else read  # much too large: not read at all
    try:
        async with asyncio.timeout(seconds):
            if read == 0:
                # A client reads the answer when it has sent its body, so some of a body that is too large is
                # received and dropped.
                async for chunk in request.stream():
                    read += len(chunk)
                    if read <= limit:
                        body += chunk
                    elif read > 8 * limit:
                        break
    except ClientDisconnect:
        raise ApiError(499, "the client closed the connection") from None
    except TimeoutError:
        raise ApiError(408, f"the body took more than {seconds:g} seconds") from None
    if read > limit:
        raise ApiError(
            413, f"the body has more than {limit:,} bytes: send less", None, "request_too_large",
            {"Connection": "close"},
        )  # fmt: skip
    # Parsing megabytes would delay the tokens of other requests.
    return _parse_body(body) if len(body) <= MAX_IN_LOOP else await asyncio.to_thread(_parse_body, body)


def _parse_body(body: bytearray) -> Any:
    encoding = json.detect_encoding(bytes(body[:4])).upper()[:6]
    if encoding in ("UTF-16", "UTF-32"):
        raise ApiError(400, f"the body looks like {encoding}: send JSON in UTF-8", None, "invalid_json")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"the body is no UTF-8 from byte {error.start:,} on: send JSON in UTF-8"
        raise ApiError(400, message, None, "invalid_json") from None
    try:
        return read_json(text)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}"[:200], None, "invalid_json") from None
