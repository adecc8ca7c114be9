"""JSON over HTTP: strict JSON of request bodies, answers, and server-sent events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlx_kv.files.decoding import read_json
from mlx_kv.server.errors import ApiError

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
    if kind != "application/json":  # pages of other sites cannot send it without a preflight
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
