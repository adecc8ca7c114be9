"""Stop strings, matched exactly, also across several tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes a text on, piece by piece, up to the first stop string.

    The stop string that ends first counts, of several that end there the longest: so it does not matter how the text
    falls into pieces. What could be the beginning of one is held back until that is known.

    Args:
        strings: none of them empty.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        assert all(strings), "an empty stop string would stop everything"
        self._strings, self._held = tuple(strings), ""
        self.stopped = False
        self.matched: str | None = None  # the one that stopped it

    def feed(self, text: str) -> str:
        """What can be said now of the text so far. After a stop, nothing."""
        if self.stopped:
            return ""
        if not self._strings:
            return text
        text = self._held + text
        found = [(start + len(string), start) for string in self._strings if (start := text.find(string)) >= 0]
        if found:
            end, start = min(found)
            self.stopped, self._held, self.matched = True, "", text[start:end]
            return text[:start]
        keep = max(self._beginning(text, string) for string in self._strings)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text has ended: what was held back."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _beginning(text: str, string: str) -> int:
        """The length of the longest end of the text that a stop string begins with."""
        longest = min(len(text), len(string) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
