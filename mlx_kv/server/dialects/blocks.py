"""An answer in the order of its parts: what a model thought, what it said, what it called.

Decides where one part ends and the next begins. White space alone between two parts is none. Knows nothing about the
objects of any API.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mlx_kv.server.chat_output import Delta


class Kind(Enum):
    """What a part is."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Event(Enum):
    """What happens to a part."""

    BEGINS = "begins"
    GROWS = "grows"
    ENDS = "ends"


@dataclass
class Block:
    """A part of an answer.

    Attributes:
        index: among the parts.
        text: so far; of a call, its arguments in JSON.
        name, call_id: of a call.
    """

    index: int
    kind: Kind
    text: str = ""
    name: str = ""
    call_id: str = ""


Change = tuple[Event, Block, str]  # the text that a part grows by, or nothing


class Blocks:
    """The parts of one answer, as it comes."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._held = ""  # white space, which may be between two parts

    def add(self, delta: Delta) -> Iterator[Change]:
        """What a part of the answer changes."""
        if delta.reasoning:
            yield from self._grow(Kind.REASONING, delta.reasoning)
        if delta.content:
            yield from self._grow(Kind.TEXT, delta.content)
        for call in delta.tool_calls:
            yield from self._call(call)

    def finish(self) -> Iterator[Change]:
        """The answer has ended."""
        if not self.all and self._held:
            held = self._held
            yield from self._begin(Block(0, Kind.TEXT))
            yield from self._more(held)
        yield from self._end()

    def _grow(self, kind: Kind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind is not kind:
            text = self._held + text
            if not text.strip():
                self._held = text
                return
            yield from self._begin(Block(len(self.all), kind))
        yield from self._more(text)

    def _call(self, call: dict[str, Any]) -> Iterator[Change]:
        function = call["function"]
        yield from self._begin(Block(len(self.all), Kind.CALL, name=function["name"], call_id=call["id"]))
        yield from self._more(function["arguments"])
        yield from self._end()

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self._end()
        self._held, self._open = "", block
        self.all.append(block)
        yield Event.BEGINS, block, ""

    def _more(self, text: str) -> Iterator[Change]:
        assert self._open is not None, "a part grows that has not begun"
        self._open.text += text
        yield Event.GROWS, self._open, text

    def _end(self) -> Iterator[Change]:
        ended, self._open = self._open, None
        if ended is not None:
            yield Event.ENDS, ended, ""
