"""Thinking of a model before its answer: where it begins and ends, what may follow it, and a limit of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_kv.generation.encoding import ChatSettings, begins_reasoning

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Marks:
    """Tokens that begin and end thinking, and calls, in which other marks are text.

    Attributes:
        inside: whether the prompt ends within thinking.
        call, call_end: of calls; a call that begins in thinking ends it.
    """

    start: Tokens
    end: Tokens
    inside: bool
    call: Tokens = ()
    call_end: Tokens = ()

    @classmethod
    def after(cls, tokenizer: Any, prompt: Sequence[int], beginning: str = "") -> Marks | None:
        """Of the answer to a chat; None where the model does not think, or the template has ended its thinking.

        Args:
            prompt: token ids.
            beginning: of the answer, at the end of the prompt.
        """
        inside = begins_reasoning(tokenizer, prompt, beginning)
        if inside is None or not tokenizer.has_thinking:
            return None
        calls = tokenizer.tool_call_start_tokens, tokenizer.tool_call_end_tokens
        call, call_end = map(tuple, calls) if tokenizer.has_tool_calling and all(calls) else ((), ())
        return cls(tuple(tokenizer.think_start_tokens), tuple(tokenizer.think_end_tokens), inside, call, call_end)

    def spans(self, answer: list[int]) -> list[tuple[int, int | None]]:
        """First and last + 1 of each run of thinking in an answer, without marks; of one that goes on, None is last."""
        spans: list[tuple[int, int | None]] = []
        place, thinks = 0, self.inside
        while True:
            mark = self.end if thinks else self.start
            found = [
                (at, which) for which in (mark, self.call) if which and (at := find(answer, which, place)) is not None
            ]
            at, which = min(found, default=(None, ()))
            if thinks:
                spans.append((place, at))
            if at is None:
                return spans
            place, thinks = at + len(which), which == self.start
            if which == self.call:
                end = find(answer, self.call_end, place)
                if end is None:
                    return spans
                place = end + len(self.call_end)

    def count(self, answer: list[int]) -> int:
        """Tokens of thinking in an answer."""
        return sum((len(answer) if end is None else end) - first for first, end in self.spans(answer))


class ThinkingLimit:
    """A logits processor that ends thinking after some tokens, with the model's own mark.

    What it forces follows from the tokens before alone, so that drafts, batches and rows that start again have the same
    text.

    Args:
        marks: of the model.
        limit: tokens of thinking, without marks, and without the closing sentence.
        closing: tokens that come before the mark where thinking is ended.
        prompt_tokens: how many of the tokens that are shown are not the answer's.
    """

    def __init__(self, marks: Marks, limit: int, closing: Tokens, prompt_tokens: int) -> None:
        self._marks, self._limit, self._closing, self._prompt_tokens = marks, limit, closing, prompt_tokens

    @classmethod
    def after(
        cls, tokenizer: Any, prompt: Sequence[int], settings: ChatSettings, before: int = 0
    ) -> ThinkingLimit | None:
        """Of the answer to a chat; None where there is no limit, or no thinking.

        Args:
            prompt: token ids that are read now.
            settings: of the chat.
            before: number of tokens before them that are shown as well.
        """
        marks = Marks.after(tokenizer, prompt, settings.beginning or "")
        if settings.thinking_budget is None or marks is None:
            return None
        closing = tuple(tokenizer.encode(settings.thinking_closing, add_special_tokens=False))
        return cls(marks, settings.thinking_budget, closing, before + len(prompt))

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits (1, V) after tokens (n,): of one token alone, where that is forced."""
        if len(tokens) - self._prompt_tokens < self._limit:  # nothing to know: the model goes on meanwhile
            return logits
        shown = tokens[self._prompt_tokens :]
        mx.async_eval(shown)  # type: ignore[no-untyped-call]
        mx.async_eval(logits)  # type: ignore[no-untyped-call]  # the model goes on meanwhile
        forced = self._forced(shown.tolist())  # type: ignore[arg-type]
        if forced is None:
            return logits
        only = mx.arange(logits.shape[-1]) == forced
        return mx.where(only, mx.zeros_like(logits), mx.array(-mx.inf, dtype=logits.dtype))

    def allowed(self, tokens: mx.array, drafted: list[int]) -> int:
        """How many of the drafted tokens can stand after these."""
        if len(tokens) + len(drafted) - self._prompt_tokens < self._limit:
            return len(drafted)
        answer: Any = tokens[self._prompt_tokens :].tolist()
        for count, token in enumerate(drafted):
            if self._forced([*answer, *drafted[:count]]) not in (None, token):
                return count
        return len(drafted)

    def reached(self, answer: list[int]) -> bool:
        """Whether thinking in an answer was ended."""
        return self._marks.count(answer) >= self._limit and bool(self._marks.spans(answer))

    def _forced(self, answer: list[int]) -> int | None:
        """The only token that may come next; None where any may."""
        *before, (first, last) = self._marks.spans(answer) or [(0, 0)]
        if last is not None:
            return None
        left = max(0, self._limit - sum((end or 0) - start for start, end in before))
        free, rest, end = answer[first:][:left], answer[first:][left:], self._marks.end
        if len(free) < left:
            return None
        # The model may have begun to end it itself.
        begun = next((n for n in range(len(end) - 1, 0, -1) if tuple(free[-n:]) == end[:n]), 0)
        following = end[begun:] if begun else end if before else (*self._closing, *end)
        # Behind a draft that is wrong, other tokens may stand here.
        return following[len(rest)] if tuple(rest) == following[: len(rest)] else None


@dataclass(frozen=True)
class LeadIn:
    """What may come before the grammar of an answer, or in its place; by default nothing.

    Attributes:
        start, end: the marks of thinking.
        in_thinking: the prompt ends within thinking.
        call: the mark with which a call begins. What follows it is constrained only with `anything`.
        anything: any text may come, and the grammar begins with the first call.
    """

    start: Tokens = ()
    end: Tokens = ()
    in_thinking: bool = False
    call: Tokens = ()
    anything: bool = False

    @classmethod
    def after(
        cls, tokenizer: Any, prompt: Sequence[int], calls: bool = False, beginning: str = "", anything: bool = False
    ) -> LeadIn:
        """Of the answer of a model to a chat.

        Args:
            calls: whether it may be a call, if the model knows how to.
            beginning: of the answer, at the end of the prompt.
            anything: as of the class.
        """
        call = tuple(tokenizer.tool_call_start_tokens) if calls and tokenizer.has_tool_calling else ()
        marks = Marks.after(tokenizer, prompt, beginning)
        if marks is None:
            return cls(call=call, anything=anything)
        return cls(marks.start, marks.end, marks.inside, call, anything)

    def grammar_from(self, answer: list[int]) -> int | None:
        """Where in an answer the grammar begins; None where it does not, or not yet."""
        begins = self._thought(answer)
        if begins is not None and self.anything:
            return find(answer, self.call, begins)
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
        marks = [(self.call, begins)] if self.in_thinking else [(self.call, begins), (self.start, 0)]
        return [
            mark[len(answer) - place]
            for mark, place in marks
            if place <= len(answer) < place + len(mark) and tuple(answer[place:]) == mark[: len(answer) - place]
        ]

    def _thought(self, answer: list[int]) -> int | None:
        """Where its thinking ends; None where it has not."""
        first = 0 if self.in_thinking else len(self.start)
        if not self.in_thinking and (not self.start or tuple(answer[:first]) != self.start):
            return 0
        end = find(answer, self.end, first)
        return None if end is None else end + len(self.end)


def find(tokens: list[int], pattern: Tokens, place: int) -> int | None:
    """Where these stand first, from a place on."""
    while True:
        try:
            place = tokens.index(pattern[0], place)
        except ValueError:
            return None
        if tuple(tokens[place : place + len(pattern)]) == pattern:
            return place
        place += 1
