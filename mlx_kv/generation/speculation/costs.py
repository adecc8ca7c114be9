"""What a pass costs, by how many rows and tokens it reads, as passes have shown on this machine.

A machine is not always as busy as it was: other work comes and goes, and a text gets longer. What passes take more or
less than they did before is told apart from what more tokens cost, so that a pass of today can be compared to one of a
while ago. Sizes that were not seen are worked out of those that were; of rows that are new, from rows about as many.

Decides nothing. Knows nothing about drafts or models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

MORE = 0.1  # of the cost of a token alone, for each further one in a pass, as long as nothing is known
REMEMBERED = 15  # passes of one size: their median is what such a pass costs
SWIFTNESS = 0.5  # with which a pass that takes longer than others of its size tells of a busy machine
MOST_AT_ONCE = 2.0  # times longer or shorter, that a single pass is believed


class Costs:
    """Seconds of a pass on a machine that is not busy.

    Attributes:
        load: how many times as long passes take now.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], deque[float]] = {}
        self.load = 1.0

    def note(self, rows: int, tokens: int, seconds: float) -> None:
        """A pass over so many tokens of each row took so many seconds."""
        own = self._seen.setdefault((rows, tokens), deque(maxlen=REMEMBERED))
        if own:
            times = seconds / (median(own) * self.load)
            self.load *= min(max(times, 1 / MOST_AT_ONCE), MOST_AT_ONCE) ** SWIFTNESS
        own.append(seconds / self.load)

    def times(self, rows: int, tokens: int) -> int:
        """How often such a pass was seen, of late."""
        return len(self._seen.get((rows, tokens), ()))

    def times_longer(self, rows: int) -> int:
        """How often a pass of more than one token was seen, of so many rows."""
        return sum(len(own) for (of, tokens), own in self._seen.items() if of == rows and tokens > 1)

    def like(self, rows: int, times: int) -> bool:
        """Whether passes of one token were seen so often, of about so many rows: half to twice."""
        return any(
            size == 1 and len(own) >= times and of <= 2 * rows <= 4 * of for (of, size), own in self._seen.items()
        )

    def of(self, rows: int, tokens: int) -> float:
        """Of a pass of that many rows and tokens; where nothing was seen, 1 is one of a single token."""
        known = self._known(rows)
        return _worked_out(known, tokens, partial(self._shape, rows)) if known else self._shape(rows, tokens)

    def _shape(self, rows: int, tokens: int) -> float:
        """What another number of rows would make of it: the next one that was seen."""
        others = {of for of, _ in self._seen} - {rows}
        if not others:
            return _as_guessed(tokens)
        nearest = min(others, key=lambda of: (abs(of - rows), -of))
        return _worked_out(self._known(nearest), tokens, _as_guessed)

    def _known(self, rows: int) -> dict[int, float]:
        return {tokens: median(own) for (of, tokens), own in self._seen.items() if of == rows}


def _as_guessed(tokens: int) -> float:
    return 1 + MORE * (tokens - 1)


def _worked_out(known: Mapping[int, float], tokens: int, shape: Callable[[int], float]) -> float:
    """Between what is known by a straight line, and beyond it in the proportions of another shape."""
    if tokens in known:
        return known[tokens]
    below = max((size for size in known if size < tokens), default=None)
    above = min((size for size in known if size > tokens), default=None)
    if below is not None and above is not None:
        share = (tokens - below) / (above - below)
        return known[below] + share * (known[above] - known[below])
    nearest = below or above
    assert nearest is not None, "something is known"
    return known[nearest] * shape(tokens) / shape(nearest)
