"""What may stand before a grammar in an answer, or in its place: thinking, and calls of functions.

Decides where the grammar begins, by the marks that mlx-lm's tokenizer knows: thinking that the prompt has begun goes on
until its end, and an answer may begin with some, unless the prompt has just ended it. Where functions may be called, an
answer may be a call instead. Knows nothing about grammars. All in token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class LeadIn:
    """What may come before the grammar, or in its place; by default nothing.

    Attributes:
        start, end: the marks of thinking.
        begun: the prompt ends within thinking.
        call: the mark with which a call begins. Nothing is asked of what follows it.
    """

    start: Tokens = ()
    end: Tokens = ()
    begun: bool = False
    call: Tokens = ()

    @classmethod
    def after(cls, tokenizer: Any, prompt: Sequence[int], calls: bool = False) -> LeadIn:
        """Of the answer of a model to a prompt.

        Args:
            calls: whether it may be a call, if the model knows how to.
        """
        call = tuple(tokenizer.tool_call_start_tokens) if calls and tokenizer.has_tool_calling else ()
        if not tokenizer.has_thinking:
            return cls(call=call)
        prompt = list(prompt)
        start, end = tuple(tokenizer.think_start_tokens), tuple(tokenizer.think_end_tokens)
        begun, ended = tokenizer.rfind_think_start(prompt), tokenizer.rfind_think_end(prompt)
        if begun > ended:
            return cls(start, end, True, call)
        if ended >= 0 and not tokenizer.decode(prompt[ended + len(end) :]).strip():
            return cls(call=call)  # it is not to think
        return cls(start, end, call=call)

    def grammar_from(self, answer: list[int]) -> int | None:
        """Where in an answer the grammar begins; None where it does not, or not yet."""
        begins = self._thought(answer)
        if begins is None or (self.call and tuple(answer[begins : begins + len(self.call)]) == self.call):
            return None
        return begins

    def thinks(self, answer: list[int]) -> bool:
        """Whether an answer stands within thinking that has not ended."""
        return self._thought(answer) is None

    def others(self, answer: list[int]) -> list[int]:
        """The tokens that may come next, beside the grammar's: those of marks that begin here, or have begun."""
        begins = self._thought(answer)
        if begins is None:
            return []
        marks = [(self.call, begins)] if self.begun else [(self.call, begins), (self.start, 0)]
        return [
            mark[len(answer) - place]
            for mark, place in marks
            if place <= len(answer) < place + len(mark) and tuple(answer[place:]) == mark[: len(answer) - place]
        ]

    def _thought(self, answer: list[int]) -> int | None:
        """Where its thinking ends; None where it has not."""
        first = 0 if self.begun else len(self.start)
        if not self.begun and (not self.start or tuple(answer[:first]) != self.start):
            return 0
        end = find(answer, self.end, first)
        return None if end is None else end + len(self.end)


def find(tokens: list[int], wanted: Tokens, place: int) -> int | None:
    """Where these stand first, from a place on."""
    while True:
        try:
            place = tokens.index(wanted[0], place)
        except ValueError:
            return None
        if tuple(tokens[place : place + len(wanted)]) == wanted:
            return place
        place += 1
