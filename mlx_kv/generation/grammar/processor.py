"""The logits processor of a row with a grammar, and what may precede the grammar: thinking, or a function call.

The matcher of the library is rolled back and advanced to the tokens of each call, so that rounds may query any place of
a draft in any order. V is the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_kv.generation.grammar.constraint import error_message
from mlx_kv.generation.sequence import common_prefix


class GrammarProcessor:
    """A logits processor as mlx-lm has them, for one row.

    Args:
        matcher: the library's, where nothing has been generated.
        ends: ids of tokens that end a sequence: all that is left when the grammar is at its end.
        prompt_tokens: how many of the tokens that are shown are not the answer's.
        lead_in: what may stand before the grammar, or in its place.
    """

    def __init__(self, matcher: Any, ends: tuple[int, ...], prompt_tokens: int, lead_in: LeadIn) -> None:
        self._fresh, self._matcher = matcher, matcher.deep_copy()
        self._ends, self._prompt_tokens, self._lead_in = ends, prompt_tokens, lead_in
        self._consumed: list[int] = []
        self._failed: tuple[list[int], str] | None = None  # after which tokens the library gave up, and why

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits (1, V) after tokens (n,): minus infinity where the grammar has no such token.

        While the model thinks, before the grammar begins, all but the end of the answer may come. Where the tokens
        themselves are none of the grammar's, as behind a draft that is wrong, nothing is changed.
        """
        shown = tokens[self._prompt_tokens :]
        mx.async_eval(shown)  # type: ignore[no-untyped-call]
        mx.async_eval(logits)  # type: ignore[no-untyped-call]  # the model goes on while the mask is made
        answer: Any = shown.tolist()
        begins = self._lead_in.grammar_from(answer)
        if begins is None:  # a call may end, but thinking that does leaves no answer
            return _masked(logits, ~self._where_it_ends(logits)) if self._lead_in.thinks(answer) else logits
        wanted = answer[begins:]
        follows, others = self._follow(wanted), self._lead_in.others(answer)
        if not follows and not others and self._why(wanted) is None:
            return logits
        allowed = self._mask(logits.shape[-1]) if follows else np.zeros(logits.shape[-1], dtype=bool)
        allowed[others] = True
        return _masked(logits, allowed if allowed.any() else self._where_it_ends(logits))

    def allowed(self, tokens: mx.array, drafted: list[int]) -> int:
        """How many of the drafted tokens can stand after these."""
        answer: Any = tokens[self._prompt_tokens :].tolist()
        together = [*answer, *drafted]
        begins = self._lead_in.grammar_from(together)
        if begins is None or self._lead_in.others(together):
            return self._end(drafted) if self._lead_in.thinks(together) else len(drafted)
        first = max(begins - len(answer), 0)  # what comes before is thinking, which does not end the answer
        if (end := self._end(drafted[:first])) < first:
            return end
        known, rest = together[begins : len(answer) + first], drafted[first:]
        if not self._follow(known):
            return first
        text = rest[: self._end(rest)]
        count = int(self._matcher.validate_tokens(text))
        ends = count == len(text) < len(rest) and self._follow([*known, *text]) and self._matcher.is_accepting()
        return first + count + int(ends)

    def error_in(self, answer: Sequence[int]) -> str | None:
        """Why the grammar could not be followed to the end of an answer, in the library's words: it ended with that.

        None where it could, whatever was met behind drafts that were wrong.
        """
        begins = self._lead_in.grammar_from(list(answer))
        return None if begins is None else self._why(list(answer[begins:]))

    def _why(self, tokens: list[int]) -> str | None:
        """Why the library can say nothing of what follows these tokens; None where it can."""
        if self._failed is None or tokens[: len(self._failed[0])] != self._failed[0]:
            return None
        return self._failed[1]

    def _follow(self, wanted: list[int]) -> bool:
        """Has the matcher stand after these tokens; whether they are the grammar's, and it goes on."""
        if self._why(wanted) is not None:
            return False
        same = common_prefix(self._consumed, wanted)
        back = len(self._consumed) - same
        if self._matcher.is_error() or (back and not self._matcher.rollback(back)):
            self._matcher, self._consumed = self._fresh.deep_copy(), []
        del self._consumed[same:]
        more = wanted[len(self._consumed) : self._end(wanted)]
        taken = int(self._matcher.try_consume_tokens(more)) if more else 0
        self._consumed += more[:taken]
        return self._works(more[taken : taken + 1]) and len(self._consumed) == len(wanted)

    def _end(self, tokens: list[int]) -> int:
        """Position of the first end token. They are not part of the grammar, so llguidance gets none of them."""
        return min((tokens.index(end) for end in self._ends if end in tokens), default=len(tokens))

    def _mask(self, vocabulary: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which tokens (V,) may come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        found = np.unpackbits(bits, count=min(vocabulary, 8 * bits.size), bitorder="little").astype(bool)
        allowed = np.zeros(vocabulary, dtype=bool)
        allowed[: found.size] = found
        return allowed & self._works()

    def _where_it_ends(self, logits: mx.array) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which tokens (V,) of logits (1, V) end a sequence."""
        ends = np.zeros(logits.shape[-1], dtype=bool)
        ends[[token for token in self._ends if token < ends.size]] = True
        return ends

    def _works(self, at: Sequence[int] = ()) -> bool:
        """Whether the library still can. A matcher that has given up never goes on, but others may, elsewhere.

        Args:
            at: the token at which it may have given up; none is after what was consumed.
        """
        if not self._matcher.is_error():
            return True
        self._failed = [*self._consumed, *at], error_message(self._matcher.get_error())
        return False


def _masked(logits: mx.array, allowed: np.ndarray[Any, np.dtype[np.bool_]]) -> mx.array:
    """Logits (1, V) with minus infinity for tokens (V,) that are not allowed."""
    return mx.where(mx.array(allowed), logits, mx.array(-mx.inf, dtype=logits.dtype))


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
