"""Drafts from the longest suffix that occurred before: in the row's own text, or in recent answers of other rows.

A draft has as many tokens as were matched, at most. It changes no token; but the speed of an answer can reveal that the
same text was generated for another client recently.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_kv.generation.speculation.drafters.automaton import Matcher, SuffixAutomaton
from mlx_kv.generation.speculation.drafters.lookup import LookupDrafter, Text, continued
from mlx_kv.generation.speculation.drafters.protocol import DrafterContext

MOST_RECENT = 2**16  # tokens of a generation of recent answers, of which there are two
LEAD = 16  # tokens of a prompt that are kept before its answer, so that the beginning of an answer is found
BETWEEN = -1  # separates two answers: no token has this id


class RecentAnswers:
    """What rows that are gone have said, each with the end of its prompt.

    Args:
        most: tokens of a generation. When one is full, the one before it is forgotten.

    Attributes:
        generations: the newest first, one or two.
    """

    def __init__(self, most: int = MOST_RECENT) -> None:
        self._most = most
        self.generations = [SuffixAutomaton()]

    def add(self, tokens: Sequence[int]) -> None:
        tokens = [*tokens[-(self._most - 1) :], BETWEEN]
        if len(self.generations[0].text) + len(tokens) > self._most:
            self.generations = [SuffixAutomaton(), self.generations[0]]
        self.generations[0].extend(tokens)


class SuffixText(Text):
    """One text, its automaton, and how its end matches recent answers."""

    def __init__(self, prompt: Sequence[int], least: int, recent: RecentAnswers) -> None:
        self._own, self._least, self._recent = SuffixAutomaton(), least, recent
        self._begun = max(0, len(prompt) - LEAD)  # from where on it is kept for others
        self._prompt = len(prompt)
        self._matchers: list[Matcher] = []
        self._own.extend(prompt)
        self._match(prompt[self._begun :])

    def extend(self, tokens: Sequence[int]) -> None:
        self._own.extend(tokens)
        self._match(tokens)

    def _match(self, tokens: Sequence[int]) -> None:
        there = {id(matcher.automaton): matcher for matcher in self._matchers}
        self._matchers = [there.get(id(each)) or Matcher(each) for each in self._recent.generations]
        for matcher in self._matchers:
            matcher.extend(tokens)

    def continuation(self, most: int) -> list[int]:
        """Of the longest match; its own where another's is no longer."""
        other = max(self._matchers, key=lambda matcher: matcher.matched)  # of the newest answers, if both are as long
        if other.matched >= self._least and other.matched > self._own.matched:
            said = list(other.automaton.text[other.after : other.after + min(most, other.matched)])
            if said[:1] != [BETWEEN]:
                return said[: said.index(BETWEEN)] if BETWEEN in said else said
        if self._own.matched < self._least:
            return []
        return continued(self._own.text, self._own.after, min(most, self._own.matched))

    def ended(self) -> None:
        if len(self._own.text) > self._prompt:
            self._recent.add(list(self._own.text[self._begun :]))


class SuffixDrafter(LookupDrafter):
    """As many tokens as the end of a row has in common with what was said before, from `lookup_min` up."""

    name = "suffix"

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self._recent = RecentAnswers()

    def new_text(self, prompt: Sequence[int]) -> SuffixText:
        return SuffixText(prompt, self.context.lookup_min, self._recent)
