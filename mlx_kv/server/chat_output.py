"""The text of an answer taken apart: content, reasoning and tool calls, as it comes.

Decides nothing about where one begins: mlx-lm's state machine and tool parsers do the parsing. What a model writes as a
call and is none stays text. Knows nothing about HTTP, nor about the objects that clients get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.server import ToolCallFormatter
from mlx_lm.tool_parsers import json_tools

from mlx_kv.files.decoding import read_json
from mlx_kv.server.json_http import json_bytes
from mlx_kv.server.token_texts import TokenText


@dataclass
class Delta:
    """A part of an answer.

    Attributes:
        logprobs: of its tokens, where they are wanted. Text may come later than the tokens that it is made of.
        spoken: those of them that are neither of a thought nor of a call.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)
    spoken: list[TokenText] = field(default_factory=list)

    def add(self, other: Delta) -> None:
        self.logprobs += other.logprobs
        self.spoken += other.spoken
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
        one_call: whether calls after the first are dropped.
        bare_call: whether all of it but the reasoning is one call, as JSON.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: list[int],
        tools: Sequence[Any],
        stream: bool,
        one_call: bool = False,
        bare_call: bool = False,
    ) -> None:
        tool_parser = json_tools.parse_tool_call if bare_call else tokenizer.tool_parser
        self._format = ToolCallFormatter(_checked_parser(tool_parser), tools, stream)  # type: ignore[no-untyped-call]
        initial = "normal"
        if tokenizer.has_thinking and tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt):
            initial = "reasoning"
        machine = make_text_state_machine(tokenizer)  # type: ignore[no-untyped-call]
        self._state = machine.make_state(tokenizer.response_initial_state or initial)
        self._previous, self._call, self.called = self._state[0], "", False
        self._one_call, self._bare_call = one_call, bare_call

    @property
    def reasons(self) -> bool:
        """Whether what came last was reasoning."""
        return bool(self._previous == "reasoning")

    @property
    def speaks(self) -> bool:
        """Whether what came last was content, or may yet be."""
        return self._previous not in ("reasoning", "tool") and not self._bare_call

    def feed(self, text: str) -> Delta:
        self._state, segments = TextStateMachine.split(self._state, text)  # type: ignore[no-untyped-call]
        return self._split(segments)

    def finish(self) -> Delta:
        """The text has ended: what was held back."""
        self._state, rest, state = TextStateMachine.flush(self._state)  # type: ignore[no-untyped-call]
        delta = self._split([(state, rest)])
        if (self._previous == "tool" or self._bare_call) and self._call:
            delta.add(self._tool_call())
        return delta

    def _split(self, segments: list[tuple[str | None, str]]) -> Delta:
        delta = Delta()
        for state, text in segments:
            if self._previous == "tool" and state != "tool":
                delta.add(self._tool_call())
            if state == "tool" or (self._bare_call and state != "reasoning"):
                self._call += text
            elif state == "reasoning":
                delta.reasoning += text
            else:
                delta.content += text
            self._previous = state
        return delta

    def _tool_call(self) -> Delta:
        """The call that has ended; as it was written, where it is none."""
        text, self._call = self._call, ""
        calls: list[dict[str, Any]] = self._format([text])
        if not calls:
            return Delta(text)
        kept = calls if not self._one_call else calls[: 0 if self.called else 1]
        self.called = True
        return Delta(tool_calls=kept)


def _checked_parser(parser: Callable[..., Any]) -> Callable[..., Any]:
    """A tool parser that raises ValueError for whatever is no call, as mlx-lm's formatter takes it."""

    def parse(text: str, tools: Any) -> list[dict[str, Any]]:
        try:
            parsed = parser(text, tools)
            calls = [dict(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
            named = [call | {"name": str(call["name"]), "arguments": call.get("arguments", {})} for call in calls]
            return list(read_json(json_bytes(named)))  # what JSON cannot have, as NaN, makes it none
        except Exception as error:  # models write what they like
            raise ValueError(f"no tool call: {type(error).__name__}") from error

    return parse
