"""The content of chats, as the bodies of all dialects become it: texts, reasoning, calls, and results of calls.

`as_chat` returns it in the form that chat templates receive: the messages, calls and tools of OpenAI's chats. An answer
has the same content.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Required, TypeAlias

from pydantic import StringConstraints
from typing_extensions import TypedDict

Messages = list[dict[str, Any]]
CHAT_ROLES = {"developer": "system", "function": "tool"}  # what some clients name otherwise

# --- content of messages ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A text."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """What the assistant thought before its text and its calls."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call of the assistant.

    Attributes:
        arguments: JSON of an object. Otherwise a template gets the call as a text.
    """

    call_id: str
    name: str
    arguments: str

    @classmethod
    def of(cls, call_id: str, name: str, arguments: Any) -> Call:
        """A call with the arguments that a client has sent."""
        parsed = parse_arguments(arguments)
        if parsed is None and isinstance(arguments, str):
            return cls(call_id, name, arguments)
        return cls(call_id, name, json.dumps(arguments if parsed is None else parsed, ensure_ascii=False))

    def as_chat(self) -> dict[str, Any]:
        """An element of `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(frozen=True)
class Result:
    """The result of a call.

    Attributes:
        name: of the function; None leaves it out.
    """

    call_id: str
    text: str
    name: str | None = None

    def as_chat(self) -> dict[str, Any]:
        """A message of its own."""
        message = {"role": "tool", "tool_call_id": self.call_id, "content": self.text}
        return message if self.name is None else message | {"name": self.name}


def parse_arguments(value: Any) -> dict[str, Any] | None:
    """Arguments of a call as an object; None for anything else that a model or a client may have written.

    Args:
        value: the object, JSON of it, or JSON of a text that is JSON of it; none and an empty text are no arguments.
    """
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = json.loads(value or "{}")
            except (ValueError, RecursionError):
                return None
    return {} if value is None else value if isinstance(value, dict) else None


def arguments_object(arguments: str) -> dict[str, Any]:
    """Arguments of a call as an object, for an answer that has to have one."""
    parsed = parse_arguments(arguments)
    return {"arguments": json.loads(arguments)} if parsed is None else parsed


class OpenCalls:
    """Calls without a result, in a conversation whose results may leave out the call's id or the function's name."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def add(self, calls: Sequence[Call]) -> None:
        """The calls of the next message; results of earlier ones are no longer expected."""
        self._calls = list(calls) or self._calls

    def result(self, call_id: str, text: str, name: str) -> Result:
        """The result of one of them: with this id, or of this function, or of the first."""
        for call in self._calls:
            if call_id in ("", call.call_id) and name in ("", call.name):
                self._calls.remove(call)
                return Result(call.call_id, text, call.name)
        return Result(call_id or "call_0", text, name or None)


Part: TypeAlias = Text | Reasoning | Call | Result


@dataclass
class Message:
    """A message with its content in order."""

    role: str
    parts: list[Part] = field(default_factory=list)

    def as_chat(self) -> Messages:
        """The messages of a chat with this content: there, results of calls are messages of their own, before it."""
        results = [part.as_chat() for part in self.parts if isinstance(part, Result)]
        content, reasoning = self.text(Text), self.text(Reasoning)
        if results and not content:
            return results
        calls = [part.as_chat() for part in self.parts if isinstance(part, Call)]
        message: dict[str, Any] = {"role": CHAT_ROLES.get(self.role, self.role), "content": content}
        message |= {"reasoning": reasoning} if reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        return [*results, message]

    def text(self, kind: type[Text] | type[Reasoning]) -> str:
        """All parts of a kind, each in lines of its own."""
        return "\n".join(part.text for part in self.parts if isinstance(part, kind) and part.text)


def as_chat(messages: Sequence[Message]) -> Messages:
    """The messages of a chat."""
    return [each for message in messages for each in message.as_chat()]


# --- tools ------------------------------------------------------------------------------------------------------------


class ToolFunction(TypedDict, total=False):
    """A function that a model may call."""

    name: Required[Annotated[str, StringConstraints(min_length=1)]]
    description: Any
    parameters: Any
    strict: Any


class Tool(TypedDict, total=False):
    """A tool of a chat."""

    type: Any
    function: Required[ToolFunction]


def tool(name: str, description: Any = None, parameters: Any = None, strict: Any = None) -> Tool:
    """A function as a tool of a chat, without what is None."""
    fields = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    function: Any = {key: value for key, value in fields.items() if value is not None}
    return {"type": "function", "function": function}
