"""How many tokens are drafted for a round: as many as have paid so far, on this machine, for these rows; or none.

A round that reads L drafted tokens of each row takes cost(L + 1), and gives each row one token and those of its draft
that were right. What it costs and what was right is what rounds have shown, so

    tokens per second = sum over rows of (1 + expected right of L) / (cost(L + 1) + cost of drafting L)

is known for every L, and the best one is taken. Where that is none, nothing is drafted, and it is tried again later:
at once when drafts cost nothing and would have been right, else now and then, and ever more seldom.

Decides nothing but that number. Knows nothing about models, caches or where drafts come from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from statistics import median

FADE = 0.98  # of what was seen, with each round that says more about a row
FIRST_RIGHT = 0.7  # a guess, as long as nothing is known
PRIOR_WEIGHT = 4.0  # tokens for which the guess counts, and for a row what is known of all rows
MORE = 0.1  # of the cost of a token alone, for each further one in a pass, as long as nothing is known
REMEMBERED = 7  # rounds of one size: their median is what such a round costs
MEASURED_FIRST = 3  # rounds without drafts: what they cost is what all else is compared to
TRIALS = 2  # rounds that are drafted to see whether it pays again
LEAST_WAIT, MOST_WAIT = 32, 1024  # rounds without drafts between trials


class Acceptance:
    """Which of the drafted tokens were right, place by place, as it has been of late.

    Args:
        most: tokens that are drafted at once.
    """

    def __init__(self, most: int) -> None:
        self._right, self._tried = [0.0] * most, [0.0] * most

    def note(self, drafted: int, right: int) -> None:
        """So many tokens were drafted, and the first `right` of them were accepted."""
        self._right = [FADE * count for count in self._right]
        self._tried = [FADE * count for count in self._tried]
        for place in range(min(drafted, right + 1)):
            self._tried[place] += 1
            self._right[place] += place < right

    def chances(self, prior: Sequence[float] = ()) -> list[float]:
        """That a token is right if those before it are, of each place."""
        chances: list[float] = []
        guess = FIRST_RIGHT
        for place, (right, tried) in enumerate(zip(self._right, self._tried, strict=True)):
            guess = prior[place] if prior else guess
            guess = (right + PRIOR_WEIGHT * guess) / (tried + PRIOR_WEIGHT)
            chances.append(guess)
        return chances


class Costs:
    """Seconds of a pass, by how many rows and tokens it reads; what was not seen is worked out of what was."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], deque[float]] = {}

    def note(self, rows: int, tokens: int, seconds: float) -> None:
        self._seen.setdefault((rows, tokens), deque(maxlen=REMEMBERED)).append(seconds)

    def times(self, rows: int, tokens: int) -> int:
        """How often such a pass was seen, of late."""
        return len(self._seen.get((rows, tokens), ()))

    def of(self, rows: int, tokens: int) -> float:
        """Of a pass of that many rows and tokens; 1 for one of a single token, where nothing was seen."""
        known = {size: median(seconds) for (of, size), seconds in self._seen.items() if of == rows}
        if tokens in known:
            return known[tokens]
        below = max((size for size in known if size < tokens), default=None)
        above = min((size for size in known if size > tokens), default=None)
        if below is None:
            return 1 + MORE * (tokens - 1) if above is None else known[above]
        if above is None:
            return known[below] * (1 + MORE * (tokens - below) / (1 + MORE * (below - 1)))
        share = (tokens - below) / (above - below)
        return known[below] + share * (known[above] - known[below])


class Pace:
    """The number of tokens that are drafted for each round.

    Args:
        most: at once, for one row.
        free: whether drafts cost nothing: then they are made in any case, and judged also where they are not used.
        fixed: as many as may be, always.
        replays: whether a row that had a wrong token reads all of that pass again, but for what was wrong.

    Attributes:
        length: that was chosen last.
    """

    def __init__(self, most: int, free: bool, fixed: bool = False, replays: bool = False) -> None:
        self.most, self.free, self.fixed, self.replays = most, free, fixed, replays
        self.length = most if fixed else 0
        self._sizes = sorted({0, *(size for size in (1, 2, 4, 8, 16, 32, 64) if size < most), most})
        self._all, self._rows = Acceptance(most), list[Acceptance]()
        self._costs, self._drafting = Costs(), dict[int, deque[float]]()
        self._shadows: list[
            tuple[list[int], int] | None
        ] = []  # of each row, what was not used, and how far it is right
        self._rounds_off, self._wait, self._trials = 0, LEAST_WAIT, 0

    # --- rows -----------------------------------------------------------------------------------------------------

    def join(self, rows: int) -> None:
        """So many new rows, after those that there are."""
        self._rows += [Acceptance(self.most) for _ in range(rows)]
        self._shadows += [None] * rows

    def keep(self, rows: Sequence[int]) -> None:
        """Lets all other rows go."""
        self._rows = [self._rows[row] for row in rows]
        self._shadows = [self._shadows[row] for row in rows]

    # --- what is chosen -------------------------------------------------------------------------------------------

    def choose(self, most: int, waiting: int = 0, proposed: Sequence[int] | None = None) -> int:
        """Tokens to draft for each row in the round that comes; 0 drafts nothing.

        Args:
            most: that there is use for.
            waiting: tokens that the pass reads again besides.
            proposed: how many each row could have, where that is known: where drafts are free.
        """
        rows = len(self._rows)
        longest = min(most, self.most) if proposed is None else min(most, max(proposed, default=0))
        if self.fixed:
            return longest
        if longest <= 0 or self._costs.times(rows, 1) < MEASURED_FIRST:
            return 0
        if self._trials:
            self.length = min(self._trial, longest)
            return self.length
        sizes = [size for size in self._sizes if size < longest] + [longest]
        speeds = {size: self._speed(size, waiting, proposed) for size in sizes}
        self.length = max(sizes, key=lambda size: (speeds[size], -size))
        if self.length == 0 and not self.free:
            self._rounds_off += 1
            if self._rounds_off >= self._wait:
                self._rounds_off, self._trials, self._wait = 0, TRIALS, min(2 * self._wait, MOST_WAIT)
        elif self.length:
            self._rounds_off, self._wait = 0, LEAST_WAIT
        return self.length

    @property
    def _trial(self) -> int:
        """Tokens of a trial: few, and as many as tell whether more would pay."""
        return min(2, self.most)

    def _speed(self, size: int, waiting: int, proposed: Sequence[int] | None) -> float:
        """Expected tokens per second of a round that drafts so many."""
        rows = len(self._rows)
        prior = self._all.chances()
        gained, again = float(rows), 0.0
        for row, own in enumerate(self._rows):
            count = size if proposed is None else min(size, proposed[row])
            right = list(accumulate(own.chances(prior)[:count], mul))
            gained += sum(right)
            if self.replays and right:  # what a wrong token has the next pass read again, of the row that has most
                again = max(again, (1 - right[-1]) * (1 + waiting + sum(right)))
        drafting = 0.0 if self.free else size * self._seconds_a_draft(rows)
        alone, passing = self._costs.of(rows, 1), self._costs.of(rows, size + 1 + waiting)
        a_token = max(0.0, passing - alone) / max(1, size + waiting)
        return gained / (passing + drafting + again * a_token)

    def _seconds_a_draft(self, rows: int) -> float:
        """What one drafted token of each row takes."""
        seen = self._drafting.get(rows)
        return median(seen) if seen else MORE * self._costs.of(rows, 1)

    # --- what is learnt -------------------------------------------------------------------------------------------

    def passed(self, drafted: int, waiting: int, seconds: float, drafting: float = 0.0) -> None:
        """A round was done, whose pass read a token of each row, and besides these.

        Args:
            drafted: of the row that had most.
            waiting: tokens that were read again.
            seconds: that it took, without drafting.
            drafting: seconds that drafting took.
        """
        rows = len(self._rows)
        self._costs.note(rows, 1 + drafted + waiting, seconds)
        if drafted:
            self._drafting.setdefault(rows, deque(maxlen=REMEMBERED)).append(drafting / drafted)
            self._trials = max(0, self._trials - 1)

    def judged(self, drafted: Sequence[int], right: Sequence[int]) -> None:
        """Of so many drafted tokens of each row, so many were right."""
        for row, (count, hits) in enumerate(zip(drafted, right, strict=True)):
            self._note(row, count, hits)

    def _note(self, row: int, drafted: int, right: int) -> None:
        if drafted:
            self._rows[row].note(drafted, right)
            self._all.note(drafted, right)

    def unused(self, proposals: Sequence[Sequence[int]]) -> None:
        """What could have been drafted and was not: it is judged as the tokens come."""
        for row, tokens in enumerate(proposals):
            if tokens and self._shadows[row] is None:
                self._shadows[row] = list(tokens), 0

    def told(self, got: Sequence[Sequence[int]]) -> None:
        """What each row got: what was not used is held against it."""
        for row, tokens in enumerate(got):
            for token in tokens:
                shadow = self._shadows[row]
                if shadow is None:
                    break
                guessed, right = shadow
                if guessed[right] == token and right + 1 < len(guessed):
                    self._shadows[row] = guessed, right + 1
                    continue
                self._shadows[row] = None
                self._note(row, len(guessed), right + (guessed[right] == token))

    def seconds_without(self, rows: int) -> float | None:
        """What a round without drafts takes for so many rows; None where it was not seen."""
        return self._costs.of(rows, 1) if self._costs.times(rows, 1) else None
