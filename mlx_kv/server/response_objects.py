"""The objects that clients get: OpenAI's, whole or in chunks, and the frame of a server-sent event.

Decides which fields they have. Knows nothing about HTTP, nor where the text comes from.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from mlx_kv.server.chat_output import Delta
from mlx_kv.server.requests import CompletionRequest


class ResponseBuilder:
    """The objects of one answer, which share an id, a time and a model."""

    def __init__(self, request: CompletionRequest, model: str) -> None:
        self._request, self._role_sent = request, False
        self._common = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, answer: Delta, finish_reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one object."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self._request.chat:
            content = answer.content or (None if answer.tool_calls or answer.reasoning else "")
            choice["message"] = {"role": "assistant"} | answer.fields | {"content": content, "refusal": None}
        else:
            choice["text"] = answer.content
        kind = "chat.completion" if self._request.chat else "text_completion"
        return self._common | {"object": kind, "choices": [choice], "usage": usage}

    def chunk(self, delta: Delta, finish_reason: str | None = None) -> dict[str, Any]:
        """A part of a streamed answer."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self._request.chat:
            first = {} if self._role_sent else {"role": "assistant", "content": ""}
            choice["delta"], self._role_sent = first | delta.fields, True
        else:
            choice["text"] = delta.content
        return self._chunk([choice]) | ({"usage": None} if self._request.include_usage else {})

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last part, where it was asked for."""
        return self._chunk([]) | {"usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._request.chat else "text_completion"
        return self._common | {"object": kind, "choices": choices}


def usage_of(prompt_tokens: int, generated: int, cached: int) -> dict[str, Any]:
    """Token counts, those that the prefix store had among them."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
