"""An answer as a sequence of blocks: reasoning, text, calls. White space between two blocks is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mlx_kv.server.answers import Delta


class Kind(Enum):
    """The kind of a block."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Event(Enum):
    """A change of a block."""

    BEGINS = "begins"
    GROWS = "grows"
    ENDS = "ends"


@dataclass
class Block:
    """A block of an answer.

    Attributes:
        index: among the blocks.
        text: so far; of a call, its arguments as JSON.
        name, call_id: of a call.
    """

    index: int
    kind: Kind
    text: str = ""
    name: str = ""
    call_id: str = ""


Change = tuple[Event, Block, str]  # with the new text of a block that grows


class Blocks:
    """The blocks of one answer, as it comes."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._space = ""  # white space that may be between two blocks

    def add(self, delta: Delta) -> Iterator[Change]:
        """The changes that a part of the answer makes."""
        if delta.reasoning:
            yield from self._grow(Kind.REASONING, delta.reasoning)
        if delta.content:
            yield from self._grow(Kind.TEXT, delta.content)
        for call in delta.tool_calls:
            yield from self._call(call)

    def finish(self) -> Iterator[Change]:
        """The changes at the end of the answer."""
        if not self.all and self._space:
            space = self._space
            yield from self._begin(Block(0, Kind.TEXT))
            yield from self._more(space)
        yield from self._end()

    def _grow(self, kind: Kind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind is not kind:
            text = self._space + text
            if not text.strip():
                self._space = text
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
        self._space, self._open = "", block
        self.all.append(block)
        yield Event.BEGINS, block, ""

    def _more(self, text: str) -> Iterator[Change]:
        assert self._open is not None, "a block grows that has not begun"
        self._open.text += text
        yield Event.GROWS, self._open, text

    def _end(self) -> Iterator[Change]:
        ended, self._open = self._open, None
        if ended is not None:
            yield Event.ENDS, ended, ""
