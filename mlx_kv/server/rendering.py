"""JSON as it is sent: in whole answers and in events.

Decides what becomes of text that is no Unicode: clients may send half of a surrogate pair, which an answer that says it
again cannot have. Knows nothing about what is sent.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


def json_bytes(data: Any) -> bytes:
    """JSON in UTF-8, with a question mark for each half of a surrogate pair.

    Raises:
        ValueError: a number that JSON does not have.
    """
    return json.dumps(data, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


class JsonResponse(Response):
    """A whole answer, which is rendered when it is made: what fails does so before anything is sent."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)
