"""The objects that clients of completions and chats get: OpenAI's, whole or in chunks, and server-sent events.

Decides which fields they have. Knows nothing about HTTP, nor where the text comes from.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from mlx_kv.server.answers import Choice, Usage
from mlx_kv.server.chat_output import Delta
from mlx_kv.server.errors import ApiError
from mlx_kv.server.intake import Asked
from mlx_kv.server.rendering import json_bytes
from mlx_kv.server.requests import CompletionRequest, RequestRules, parse
from mlx_kv.server.token_texts import TokenText


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
        self._told: Counter[int] = Counter()  # characters of each choice's tokens whose log-probabilities were
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
        answer, logprobs = choice.answer, self._logprobs(choice, choice.answer)
        said: dict[str, Any] = {"index": choice.index, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        if self._request.chat:
            content = answer.content or (None if answer.tool_calls or answer.reasoning else "")
            said["message"] = {"role": "assistant"} | answer.fields | {"content": content, "refusal": None}
        else:
            said["text"] = answer.content
        return said

    def _logprobs(self, choice: Choice, delta: Delta) -> dict[str, Any] | None:
        """Of the tokens of an answer, or of a part of it; None where they were not asked for."""
        if choice.texts is None:
            return None
        if self._request.chat:
            return {"content": [of_chat(token) for token in delta.logprobs], "refusal": None}
        offsets = list(accumulate((len(token.text) for token in delta.logprobs), initial=self._told[choice.index]))
        self._told[choice.index] = offsets.pop()
        tops = [{other.text: other.logprob for other in reversed(token.top)} for token in delta.logprobs]
        return {
            "tokens": [token.text for token in delta.logprobs],
            "token_logprobs": [token.logprob for token in delta.logprobs],
            "top_logprobs": tops if self._request.wanted.top_logprobs else None,
            "text_offset": offsets,
        }

    def begin(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def part(self, choice: Choice, delta: Delta) -> bytes:
        said = b""
        if delta.fields or delta.logprobs or (choice.finish_reason and not self._request.chat):
            said = event(self.chunk(choice, delta))
        if choice.finish_reason:
            said += event(self.chunk(choice, Delta(), choice.finish_reason))
        return said

    def chunk(self, choice: Choice, delta: Delta, finish_reason: str | None = None) -> dict[str, Any]:
        """A part of a streamed answer."""
        logprobs = self._logprobs(choice, delta) if delta.logprobs else None
        said: dict[str, Any] = {"index": choice.index, "logprobs": logprobs, "finish_reason": finish_reason}
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


def of_chat(token: TokenText, within: bool = False) -> dict[str, Any]:
    said = {"id": token.token, "token": token.text, "bytes": list(token.data), "logprob": token.logprob}
    return said if within else said | {"top_logprobs": [of_chat(other, within=True) for other in token.top]}


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
    return head + b"data: " + json_bytes(data) + b"\n\n"
