"""A suffix automaton: every substring of a growing text, in a few numbers for each token, built online.

A state represents substrings that end at the same places of the text, each a suffix of the longest of them; its link
leads to the longest suffix that ends at more places. So the link of the state of the whole text is the longest suffix
that occurred before, and a token is added in constant time on average (Blumer et al. 1985, "The smallest automaton
recognizing the subwords of a text"). Most states continue with one token only, stored in flat arrays. A suffix is found
where its state occurred most recently.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

# Below the root lies a state from which every token leads to the root: no walk along links needs another end.
BOTTOM, ROOT = 0, 1


class SuffixAutomaton:
    """A text, and the automaton of its substrings.

    Attributes:
        text: token ids, also negative ones.
        matched: tokens of the longest suffix of the text that was there before.
        after: the place after that suffix where it was met before; no place of interest if there is none.
        lengths, links: of each state, the tokens of its longest substring, and its link.
        ends: of each state, the place after its substrings where they were met most recently.
    """

    def __init__(self) -> None:
        self.text = array("i")
        self.matched = self.after = 0
        self.lengths = array("i", [-1, 0])
        self.links = array("i", [BOTTOM, BOTTOM])
        self.ends = array("i", [0, 0])
        self._last = ROOT
        # Of each state, the first token with which it goes on and where to (BOTTOM: it does not); others beside them.
        self._token = array("i", [0, 0])
        self._to = array("i", [BOTTOM, BOTTOM])
        self._others: dict[int, dict[int, int]] = {}

    def step(self, state: int, token: int) -> int:
        """Where a state goes on to with a token; BOTTOM where that is no substring."""
        if state == BOTTOM:
            return ROOT
        if self._token[state] == token:
            return self._to[state]
        others = self._others.get(state)
        return BOTTOM if others is None else others.get(token, BOTTOM)

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on with these."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        self.text.append(token)
        end, state = len(self.text), self._last
        new = self._last = self._state(self.lengths[state] + 1, end)
        while (found := self.step(state, token)) == BOTTOM:
            self._lead(state, token, new)
            state = self.links[state]
        if self.lengths[found] > self.lengths[state] + 1:
            found = self._split(found, state, token)
        self.links[new] = found
        self.matched, self.after = self.lengths[found], self.ends[found]
        self.ends[found] = end

    def _state(self, length: int, end: int) -> int:
        """A new one, from which nothing leads on."""
        self.lengths.append(length)
        self.ends.append(end)
        for each in (self.links, self._token, self._to):
            each.append(0)
        return len(self.lengths) - 1

    def _lead(self, state: int, token: int, to: int) -> None:
        if self._to[state] == BOTTOM or self._token[state] == token:
            self._token[state], self._to[state] = token, to
        else:
            self._others.setdefault(state, {})[token] = to

    def _split(self, found: int, state: int, token: int) -> int:
        """The shorter substrings of a state, those by `state` and its links, end at one more place: a new state."""
        new = self._state(self.lengths[state] + 1, self.ends[found])
        self._token[new], self._to[new], self.links[new] = self._token[found], self._to[found], self.links[found]
        if found in self._others:
            self._others[new] = dict(self._others[found])
        self.links[found] = new
        while self.step(state, token) == found:
            self._lead(state, token, new)
            state = self.links[state]
        return new


class Matcher:
    """How much of the end of one text is in the automaton of another, which may grow meanwhile.

    Attributes:
        matched: tokens of the longest suffix that is in there; if the automaton has grown, it may be that a longer one
            is by now.
    """

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton, self.matched, self._state = automaton, 0, ROOT

    @property
    def after(self) -> int:
        """The place in the automaton's text after that suffix."""
        return self.automaton.ends[self._here()]

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on with these."""
        automaton = self.automaton
        for token in tokens:
            state = self._here()
            while (found := automaton.step(state, token)) == BOTTOM:
                state = automaton.links[state]
                self.matched = automaton.lengths[state]
            self._state, self.matched = found, self.matched + 1

    def _here(self) -> int:
        """The state of the suffix: if its state was split since, that may be the shorter ones' now."""
        automaton = self.automaton
        while automaton.lengths[automaton.links[self._state]] >= self.matched:
            self._state = automaton.links[self._state]
        return self._state
