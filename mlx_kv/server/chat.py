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
        arguments: JSON of an object.
    """

    call_id: str
    name: str
    arguments: str

    @classmethod
    def of(cls, call_id: str, name: str, arguments: dict[str, Any]) -> Call:
        """A call with its arguments as an object."""
        return cls(call_id, name, json.dumps(arguments, ensure_ascii=False))

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


def arguments_object(arguments: str) -> dict[str, Any]:
    """Arguments of a call as an object; what a model wrote may be another JSON value."""
    parsed = json.loads(arguments or "{}")
    return parsed if isinstance(parsed, dict) else {"arguments": parsed}


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
        message: dict[str, Any] = {"role": self.role, "content": content}
        message |= {"reasoning": reasoning} if reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        return [*results, message]

    def text(self, kind: type[Text] | type[Reasoning]) -> str:
        """All parts of a kind, joined."""
        return "".join(part.text for part in self.parts if isinstance(part, kind))


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
