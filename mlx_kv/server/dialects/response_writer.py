"""Answers as OpenAI's responses: whole, or as events.

Decides which items and events they have, and keeps what a later request may go on from. Knows nothing about how
requests are read.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from mlx_kv.server.answers import Choice, Usage
from mlx_kv.server.chat_output import Delta
from mlx_kv.server.dialects.blocks import Block, Blocks, Change, Event, Kind
from mlx_kv.server.dialects.conversations import Conversations
from mlx_kv.server.errors import ApiError
from mlx_kv.server.response_objects import event, of_chat

# What a response says again of its request, and what it says where that does not.
ECHOED: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}


class ResponseWriter:
    """The objects of one response: an `AnswerWriter`.

    Args:
        fields: of the request.
        messages: of the chat so far, without instructions.
        conversations: where it is kept; None keeps it nowhere.
    """

    waiting = b": still there\n\n"
    last = b""

    def __init__(
        self,
        fields: dict[str, Any],
        messages: list[dict[str, Any]],
        model: str,
        conversations: Conversations | None,
    ) -> None:
        self._messages, self._conversations, self._blocks = messages, conversations, Blocks()
        self._ids: dict[int, str] = {}  # of items, by their index
        self._number = 0  # of events
        self._logprobs: dict[int, list[dict[str, Any]]] = {}  # of texts, by their index
        self._statuses: dict[int, str] = {}  # of items that have ended
        self._cut = False  # what ends now does so because there may be no more
        self._untold: list[dict[str, Any]] = []  # of tokens whose text is still to come
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        } | {name: fields.get(name, value) for name, value in ECHOED.items()}

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        self.part(choice, choice.answer)
        return self._ended(choices)

    def begin(self, choices: Sequence[Choice]) -> bytes:
        begun = self._status("in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def part(self, choice: Choice, delta: Delta) -> bytes:
        # Log-probabilities of a text that is told now or later: a token may be there before its text.
        self._untold = [] if delta.reasoning else self._untold
        self._untold += [of_chat(token) for token in delta.spoken]
        said = self._events(self._blocks.add(delta))
        self._untold = [] if delta.tool_calls else self._untold
        self._cut = choice.finish_reason == "length"
        return said + self._events(self._blocks.finish()) if choice.finish_reason else said

    def end(self, choices: Sequence[Choice]) -> bytes:
        response = self._ended(choices)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        told = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=self._status("failed") | {"error": told})

    def _ended(self, choices: Sequence[Choice]) -> dict[str, Any]:
        cut = choices[0].finish_reason == "length"
        response = self._status("incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "output": [self._item(block, self._statuses[block.index], block.text) for block in self._blocks.all],
            "usage": _usage(Usage.of(choices)),
        }
        if self._conversations is not None:
            self._conversations.keep(response, [*self._messages, self._said])
        return response

    @property
    def _said(self) -> dict[str, Any]:
        """The answer as a message of the chat."""
        blocks = self._blocks.all
        said: dict[str, Any] = {"role": "assistant", "content": _texts(blocks, Kind.TEXT)}
        calls = [
            {"id": block.call_id, "type": "function", "function": {"name": block.name, "arguments": block.text}}
            for block in blocks
            if block.kind is Kind.CALL
        ]
        named = {"reasoning": _texts(blocks, Kind.REASONING), "tool_calls": calls}
        return said | {name: value for name, value in named.items() if value}

    def _status(self, status: str) -> dict[str, Any]:
        empty: dict[str, Any] = {
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        return self._response | empty

    def _item(self, block: Block, status: str, text: str | None) -> dict[str, Any]:
        """An item with a text; None has no part yet."""
        name = self._ids.setdefault(block.index, f"{PREFIXES[block.kind]}_{uuid.uuid4().hex}")
        item = {"id": name, "status": status}
        if block.kind is Kind.CALL:
            return item | {
                "type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": text or "",
            }  # fmt: skip
        content = [] if text is None else [self._part(block, text)]
        if block.kind is Kind.REASONING:
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _told(self, block: Block) -> list[dict[str, Any]]:
        """Log-probabilities of what a text grows by."""
        told, self._untold = self._untold, []
        self._logprobs.setdefault(block.index, []).extend(told)
        return told

    def _events(self, changes: Iterable[Change]) -> bytes:
        return b"".join(self._change(*change) for change in changes)

    def _change(self, what: Event, block: Block, text: str) -> bytes:
        at: dict[str, Any] = {"output_index": block.index}
        begun = self._item(block, "in_progress", None) if what is Event.BEGINS else {}
        of: dict[str, Any] = at | {"item_id": self._ids[block.index]}
        if block.kind is not Kind.CALL:
            of["content_index"] = 0
        if what is Event.BEGINS:
            said = self._event("response.output_item.added", **at, item=begun)
            if block.kind is not Kind.CALL:
                said += self._event("response.content_part.added", **of, part=self._part(block, ""))
            return said
        if what is Event.GROWS:
            logprobs: dict[str, Any] = {"logprobs": self._told(block)} if block.kind is Kind.TEXT else {}
            return self._event(f"{_name(block)}.delta", **of, delta=text, **logprobs)
        self._statuses[block.index] = status = "incomplete" if self._cut else "completed"
        if block.kind is Kind.CALL:
            said = self._event(f"{_name(block)}.done", **of, name=block.name, arguments=block.text)
        else:
            logprobs = {"logprobs": self._logprobs.get(block.index, [])} if block.kind is Kind.TEXT else {}
            said = self._event(f"{_name(block)}.done", **of, text=block.text, **logprobs)
            said += self._event("response.content_part.done", **of, part=self._part(block, block.text))
        return said + self._event("response.output_item.done", **at, item=self._item(block, status, block.text))

    def _part(self, block: Block, text: str) -> dict[str, Any]:
        if block.kind is Kind.REASONING:
            return {"type": "reasoning_text", "text": text}
        logprobs = self._logprobs.get(block.index, []) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _event(self, kind: str, **data: Any) -> bytes:
        said = event({"type": kind, "sequence_number": self._number, **data}, kind)
        self._number += 1
        return said


def _name(block: Block) -> str:
    """Of the events in which it grows."""
    names = {Kind.CALL: "function_call_arguments", Kind.TEXT: "output_text", Kind.REASONING: "reasoning_text"}
    return f"response.{names[block.kind]}"


def _texts(blocks: Sequence[Block], kind: Kind) -> str:
    return "".join(block.text for block in blocks if block.kind is kind)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.generated,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt_tokens + usage.generated,
    }
