"""What a client gets back: OpenAI's objects, whole or in chunks.

Decides how the text of an answer becomes content, reasoning and tool calls; mlx-lm's state machine and tool parsers do
the parsing. Knows nothing about HTTP, nor where the text comes from.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.server import ToolCallFormatter

from mlx_kv.server.requests import CompletionRequest


@dataclass
class Delta:
    """A part of an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Delta) -> None:
        self.content += other.content
        self.reasoning += other.reasoning
        self.tool_calls += other.tool_calls

    @property
    def fields(self) -> dict[str, Any]:
        """Those that say something."""
        named = {"content": self.content, "reasoning": self.reasoning, "tool_calls": self.tool_calls}
        return {name: value for name, value in named.items() if value}


class ChatOutputParser:
    """Takes the text of a chat's answer apart, as it comes.

    Args:
        tokenizer: mlx-lm's, which knows the marks of reasoning and tool calls.
        prompt: token ids, which may end within reasoning.
    """

    def __init__(self, tokenizer: Any, prompt: list[int], tools: list[dict[str, Any]], stream: bool) -> None:
        self._format = ToolCallFormatter(_checked(tokenizer.tool_parser), tools, stream)  # type: ignore[no-untyped-call]
        initial = "normal"
        if tokenizer.has_thinking and tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt):
            initial = "reasoning"
        machine = make_text_state_machine(tokenizer)  # type: ignore[no-untyped-call]
        self._state = machine.make_state(tokenizer.response_initial_state or initial)
        self._before, self._call, self.called = self._state[0], "", False

    def feed(self, text: str) -> Delta:
        self._state, segments = TextStateMachine.split(self._state, text)  # type: ignore[no-untyped-call]
        return self._sorted(segments)

    def finish(self) -> Delta:
        """The text has ended: what was held back."""
        self._state, rest, state = TextStateMachine.flush(self._state)  # type: ignore[no-untyped-call]
        said = self._sorted([(state, rest)])
        if self._before == "tool" and self._call:
            said.add(self._parsed())
        return said

    def _sorted(self, segments: list[tuple[str | None, str]]) -> Delta:
        said = Delta()
        for state, text in segments:
            if self._before == "tool" and state != "tool":
                said.add(self._parsed())
            if state == "tool":
                self._call += text
            elif state == "reasoning":
                said.reasoning += text
            else:
                said.content += text
            self._before = state
        return said

    def _parsed(self) -> Delta:
        """The call that has ended; as it was written, where it is none."""
        text, self._call = self._call, ""
        calls: list[dict[str, Any]] = self._format([text])
        self.called = self.called or bool(calls)
        return Delta(tool_calls=calls) if calls else Delta(text)


def _checked(parser: Callable[..., Any]) -> Callable[..., Any]:
    """A tool parser that raises ValueError for whatever is no call, as mlx-lm's formatter takes it."""

    def parse(text: str, tools: Any) -> list[dict[str, Any]]:
        try:
            parsed = parser(text, tools)
            calls = [dict(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
            return [call | {"name": str(call["name"]), "arguments": call.get("arguments", {})} for call in calls]
        except Exception as error:  # models write what they like
            raise ValueError(f"no tool call: {type(error).__name__}") from error

    return parse


class ResponseBuilder:
    """The objects of one answer, which share an id, a time and a model."""

    def __init__(self, asked: CompletionRequest, model: str) -> None:
        self._asked, self._told_role = asked, False
        self._common = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, said: Delta, finish_reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one object."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self._asked.chat:
            content = said.content or (None if said.tool_calls or said.reasoning else "")
            choice["message"] = {"role": "assistant"} | said.fields | {"content": content, "refusal": None}
        else:
            choice["text"] = said.content
        kind = "chat.completion" if self._asked.chat else "text_completion"
        return self._common | {"object": kind, "choices": [choice], "usage": usage}

    def chunk(self, said: Delta, finish_reason: str | None = None) -> dict[str, Any]:
        """A part of a streamed answer."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self._asked.chat:
            first = {} if self._told_role else {"role": "assistant", "content": ""}
            choice["delta"], self._told_role = first | said.fields, True
        else:
            choice["text"] = said.content
        return self._chunk([choice]) | ({"usage": None} if self._asked.include_usage else {})

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last part, where it was asked for."""
        return self._chunk([]) | {"usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._asked.chat else "text_completion"
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
