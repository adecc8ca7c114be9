"""Answers as Anthropic's messages: whole, or as events.

Decides which blocks and events they have. Knows nothing about requests' fields.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from mlx_kv.server.answers import Choice, Usage
from mlx_kv.server.chat_output import Delta
from mlx_kv.server.dialects.blocks import Block, Blocks, Change, Event, Kind
from mlx_kv.server.errors import ApiError, anthropic_error
from mlx_kv.server.requests import CompletionRequest
from mlx_kv.server.response_objects import event

REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """The objects of one message: an `AnswerWriter`."""

    last = b""

    def __init__(self, request: CompletionRequest, model: str) -> None:
        self._blocks = Blocks()
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self.waiting = _event({"type": "ping"})

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        for _ in (*self._blocks.add(choice.answer), *self._blocks.finish()):
            pass
        content = [_block(block, block.text) for block in self._blocks.all]
        return self._message | {"content": content, **_end(choice), "usage": _usage(Usage.of(choices))}

    def begin(self, choices: Sequence[Choice]) -> bytes:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        empty["usage"] = _usage(Usage.of(choices))
        return _event({"type": "message_start", "message": self._message | empty}) + self.waiting

    def part(self, choice: Choice, delta: Delta) -> bytes:
        said = _events(self._blocks.add(delta))
        return said + _events(self._blocks.finish()) if choice.finish_reason else said

    def end(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        end = {"type": "message_delta", "delta": _end(choice), "usage": _usage(Usage.of(choices))}
        return _event(end) + _event({"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        return _event(anthropic_error(error))


def _events(changes: Iterable[Change]) -> bytes:
    return b"".join(_change(*change) for change in changes)


def _change(what: Event, block: Block, text: str) -> bytes:
    at = {"index": block.index}
    if what is Event.BEGINS:
        return _event({"type": "content_block_start", **at, "content_block": _block(block, "")})
    if what is Event.ENDS:
        return _event({"type": "content_block_stop", **at})
    kind, name = {
        Kind.TEXT: ("text_delta", "text"),
        Kind.REASONING: ("thinking_delta", "thinking"),
        Kind.CALL: ("input_json_delta", "partial_json"),
    }[block.kind]
    return _event({"type": "content_block_delta", **at, "delta": {"type": kind, name: text}})


def _block(block: Block, text: str) -> dict[str, Any]:
    """A block with a text; of a call, with the arguments that the text is."""
    if block.kind is Kind.TEXT:
        return {"type": "text", "text": text}
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    arguments = json.loads(text or "{}")
    return {
        "type": "tool_use", "id": block.call_id, "name": block.name,
        "input": arguments if isinstance(arguments, dict) else {"arguments": arguments},
    }  # fmt: skip


def _end(choice: Choice) -> dict[str, Any]:
    matched = choice.job.stop_strings.matched
    if choice.finish_reason == "stop" and matched is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": REASONS.get(choice.finish_reason, "end_turn"), "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, int]:
    """Tokens that had been read before are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
    }


def _event(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])
