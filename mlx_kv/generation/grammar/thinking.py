"""Where in an answer its grammar begins: after the thinking of models that think.

Decides that by the marks that mlx-lm's tokenizer knows: thinking that the prompt has begun goes on until its end, and
an answer may begin with some, unless the prompt has just ended it. Knows nothing about grammars. All in token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Thinking:
    """What may come before the grammar.

    Attributes:
        start, end: the marks; nothing of the kind without an end.
        begun: the prompt ends within thinking.
    """

    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    begun: bool = False

    @classmethod
    def after(cls, tokenizer: Any, prompt: Sequence[int]) -> Thinking:
        """That of a model's answer to a prompt."""
        if not tokenizer.has_thinking:
            return cls()
        prompt = list(prompt)
        start, end = tuple(tokenizer.think_start_tokens), tuple(tokenizer.think_end_tokens)
        begun, ended = tokenizer.rfind_think_start(prompt), tokenizer.rfind_think_end(prompt)
        if begun > ended:
            return cls(start, end, begun=True)
        if ended >= 0 and not tokenizer.decode(prompt[ended + len(end) :]).strip():
            return cls()  # it is not to think
        return cls(start, end)

    def grammar_from(self, answer: list[int]) -> int | None:
        """Where in an answer the grammar begins; None where it still thinks."""
        searched = 0
        if not self.begun:
            searched = len(self.start)
            if not self.end or tuple(answer[:searched]) != self.start:
                return 0
        end = find(answer, self.end, searched)
        return None if end is None else end + len(self.end)

    def opens(self, answer: list[int]) -> bool:
        """Whether thinking may begin with the next token, or go on to begin: the one of `start` that comes next."""
        n = len(answer)
        return not self.begun and n < len(self.start) and tuple(answer) == self.start[:n]


def find(tokens: list[int], wanted: tuple[int, ...], place: int) -> int | None:
    """Where these stand first, from a place on."""
    first, n = wanted[0], len(wanted)
    while True:
        try:
            place = tokens.index(first, place)
        except ValueError:
            return None
        if tuple(tokens[place : place + n]) == wanted:
            return place
        place += 1
