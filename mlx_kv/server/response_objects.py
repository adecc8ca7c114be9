"""The objects that clients of completions and chats get: OpenAI's, whole or in chunks, and server-sent events.

Decides which fields they have. Knows nothing about HTTP, nor where the text comes from.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from mlx_kv.server.answers import Choice, Usage
from mlx_kv.server.chat_output import Delta
from mlx_kv.server.errors import ApiError
from mlx_kv.server.intake import Asked
from mlx_kv.server.requests import CompletionRequest, RequestRules, parse


def completions(body: Any, rules: RequestRules) -> Asked:
    """A `Dialect`: OpenAI's completions."""
    return _asked(parse(body, False, rules))


def chats(body: Any, rules: RequestRules) -> Asked:
    """A `Dialect`: OpenAI's chats."""
    return _asked(parse(body, True, rules))


def _asked(request: CompletionRequest) -> Asked:
    return Asked(request, lambda model: ResponseBuilder(request, model))


class ResponseBuilder:
    """The objects of one answer, which share an id, a time and a model: an `AnswerWriter`."""

    waiting = b": still there\n\n"
    last = b"data: [DONE]\n\n"

    def __init__(self, request: CompletionRequest, model: str) -> None:
        self._request = request
        self._begun: set[int] = set()  # choices whose role was sent
        self._common = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        kind = "chat.completion" if self._request.chat else "text_completion"
        said = [self._choice(choice) for choice in choices]
        return self._common | {"object": kind, "choices": said, "usage": usage_of(Usage.of(choices))}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        said: dict[str, Any] = {"index": choice.index, "logprobs": None, "finish_reason": choice.finish_reason}
        answer = choice.answer
        if self._request.chat:
            content = answer.content or (None if answer.tool_calls or answer.reasoning else "")
            said["message"] = {"role": "assistant"} | answer.fields | {"content": content, "refusal": None}
        else:
            said["text"] = answer.content
        return said

    def begin(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def part(self, choice: Choice, delta: Delta) -> bytes:
        said = b""
        if delta.fields or (choice.finish_reason and not self._request.chat):
            said = event(self.chunk(choice, delta))
        if choice.finish_reason:
            said += event(self.chunk(choice, Delta(), choice.finish_reason))
        return said

    def chunk(self, choice: Choice, delta: Delta, finish_reason: str | None = None) -> dict[str, Any]:
        """A part of a streamed answer."""
        said: dict[str, Any] = {"index": choice.index, "logprobs": None, "finish_reason": finish_reason}
        if self._request.chat:
            first = {} if choice.index in self._begun else {"role": "assistant", "content": ""}
            said["delta"] = first | delta.fields
            self._begun.add(choice.index)
        else:
            said["text"] = delta.content
        return self._chunk([said]) | ({"usage": None} if self._request.include_usage else {})

    def end(self, choices: Sequence[Choice]) -> bytes:
        if not self._request.include_usage:
            return b""
        return event(self._chunk([]) | {"usage": usage_of(Usage.of(choices))})

    def failed(self, error: ApiError) -> bytes:
        return event(error.body)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._request.chat else "text_completion"
        return self._common | {"object": kind, "choices": choices}


def usage_of(usage: Usage) -> dict[str, Any]:
    """Token counts, those that the prefix store had among them."""
    said: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt_tokens + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
    if usage.reasoning:
        said["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
    return said


def event(data: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
