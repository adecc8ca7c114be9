"""Prompt lookup: the last n tokens of a row occurred before, and what followed them then is proposed.

They are found at their most recent place, the longest n first. Every n-gram is recorded when its last token comes, so a
token takes the same time in a text of any length, and up to 400 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_kv.generation.speculation.drafters.lookup import LookupDrafter, Text, continued


class NgramText(Text):
    """One text, and where each of its n-grams was last.

    Args:
        least, most: of n.
    """

    def __init__(self, least: int, most: int) -> None:
        self._lengths = range(least, most + 1)
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # an n-gram to the place after its most recent one
        self._found: int | None = None  # the same of the longest that the text ends with, at its place before that

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            self._found, end = None, len(self._tokens)
            for length in self._lengths:
                if length > end:
                    break
                last = tuple(self._tokens[-length:])
                # What the end of the text had before itself: it would else find itself.
                self._found = self._after.get(last, self._found)
                self._after[last] = end

    def continuation(self, most: int) -> list[int]:
        return [] if self._found is None else continued(self._tokens, self._found, most)


class NgramDrafter(LookupDrafter):
    """As many tokens as it is asked for, of rows that end with `lookup_min` tokens or more that were there before."""

    name = "ngram"

    def new_text(self, prompt: Sequence[int]) -> NgramText:
        text = NgramText(self.context.lookup_min, self.context.lookup_max)
        text.extend(prompt)
        return text
