"""The content of chats, as the bodies of all dialects become it: texts, reasoning, calls, and results of calls.

`as_chat` returns it in the form that chat templates receive: the messages, calls and tools of OpenAI's chats. An answer
has the same content: `Blocks` divides it into texts, reasoning and calls while it comes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Required, TypeAlias

from pydantic import StringConstraints
from typing_extensions import TypedDict

from mlx_kv.server.output import Delta

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
    given = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    function: Any = {key: value for key, value in given.items() if value is not None}
    return {"type": "function", "function": function}


# --- content of an answer ---------------------------------------------------------------------------------------------


class Event(Enum):
    """A change of a block."""

    BEGINS = "begins"
    GROWS = "grows"
    ENDS = "ends"


@dataclass
class Block:
    """A part of an answer that may still grow.

    Attributes:
        index: among the blocks.
        kind: what it becomes: `Text`, `Reasoning` or `Call`.
        text: so far; of a call, its arguments as JSON.
        name, call_id: of a call.
    """

    index: int
    kind: type[Text] | type[Reasoning] | type[Call]
    text: str = ""
    name: str = ""
    call_id: str = ""

    @property
    def part(self) -> Part:
        """The block as it is now."""
        return Call(self.call_id, self.name, self.text) if self.kind is Call else self.kind(self.text)  # type: ignore[call-arg]


Change = tuple[Event, Block, str]  # with the new text of a block that grows


class Blocks:
    """The blocks of one answer, as it comes. White space between two blocks is dropped."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._space = ""  # white space that may be between two blocks

    def add(self, delta: Delta) -> Iterator[Change]:
        """The changes that a part of the answer makes."""
        if delta.reasoning:
            yield from self._grow(Reasoning, delta.reasoning)
        if delta.content:
            yield from self._grow(Text, delta.content)
        for call in delta.tool_calls:
            function = call["function"]
            yield from self._begin(Block(len(self.all), Call, name=function["name"], call_id=call["id"]))
            yield from self._more(function["arguments"])
            yield from self._end()

    def finish(self) -> Iterator[Change]:
        """The changes at the end of the answer."""
        if not self.all and self._space:
            space = self._space
            yield from self._begin(Block(0, Text))
            yield from self._more(space)
        yield from self._end()

    def _grow(self, kind: type[Text] | type[Reasoning], text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind is not kind:
            text = self._space + text
            if not text.strip():
                self._space = text
                return
            yield from self._begin(Block(len(self.all), kind))
        yield from self._more(text)

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self._end()
        self._space, self._open = "", block
        self.all.append(block)
        yield Event.BEGINS, block, ""

    def _more(self, text: str) -> Iterator[Change]:
        assert self._open is not None, "a block grows that has not begun"
        self._open.text += text
        yield Event.GROWS, self._open, text

    def _end(self) -> Iterator[Change]:
        block, self._open = self._open, None
        if block is not None:
            yield Event.ENDS, block, ""


def arguments_object(arguments: str) -> dict[str, Any]:
    """Arguments of a call as an object; what a model wrote may be another JSON value."""
    parsed = json.loads(arguments or "{}")
    return parsed if isinstance(parsed, dict) else {"arguments": parsed}
