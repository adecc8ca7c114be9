"""The body of a request: read up to a limit, within a time, as strict JSON.

Decides how much of a body that is too large is still taken, so that its client hears the answer. Knows nothing about
what is asked for.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from mlx_kv.files.decoding import read_json
from mlx_kv.server.errors import ApiError


async def read_body(request: Request, limit: int, seconds: float) -> Any:
    """The JSON of a request's body.

    Args:
        limit: bytes.
        seconds: in which all of it must arrive.

    Raises:
        ApiError: it is too large, too slow, of another type or no JSON; 499 if the client hung up.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which a page of another site cannot send unasked
        raise ApiError(415, "send the body as Content-Type: application/json")
    body = bytearray()
    length = request.headers.get("content-length", "")
    read = int(length) if length.isdecimal() and len(length) < 20 else 0
    read = 0 if read <= 8 * limit else read  # hopeless: not even listened to
    try:
        async with asyncio.timeout(seconds):
            if read == 0:
                # A client that still sends does not hear the answer, so some of what is too much is taken, and
                # thrown away.
                async for chunk in request.stream():
                    read += len(chunk)
                    if read <= limit:
                        body += chunk
                    elif read > 8 * limit:
                        break
    except ClientDisconnect:
        raise ApiError(499, "the client hung up") from None
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
        raise ApiError(400, f"the body is no JSON: {error}"[:200], None, "invalid_json") from None
