"""The number of tokens drafted for a round: as many as have paid so far on this machine, for these rows, or none.

A round that reads L drafted tokens of each row takes cost(L + 1), and gives each row one token and the accepted ones of
its draft. Costs and acceptance are measured, so

    tokens per second = sum over rows of (1 + expected accepted of L) / (cost(L + 1) + cost of drafting L)

is known for every L, and the best L is taken. Where that is 0, drafts are tried again later: at once if they cost
nothing and would have been accepted, else at growing intervals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import mul
from statistics import median

FADE = 0.98  # of what was seen, with each round that says more about a row
FIRST_RIGHT = 0.7  # a guess, as long as nothing is known
PRIOR_WEIGHT = 4.0  # tokens for which the guess counts, and for a row what is known of all rows
MEASURED_FIRST = 2  # rounds without drafts: what they cost is what all else is compared to
TRUSTED = 6  # rounds with drafts of a new number of rows, before what they cost without is measured and not guessed
TRIALS = 2  # rounds that are drafted to see whether it pays again
LEAST_WAIT, MOST_WAIT = 32, 1024  # rounds without drafts between trials
LEAST_USE, MOST_USE = 32, 256  # rounds with drafts before it is seen again what one without takes
AS_BEFORE = 0.2  # a change of what it takes, as a part, that changes nothing

MORE = 0.1  # of the cost of a token alone, for each further one in a pass, as long as nothing is known
REMEMBERED = 15  # passes of one size: their median is what such a pass costs
SWIFTNESS = 0.5  # with which a pass that takes longer than others of its size tells of a busy machine
MOST_AT_ONCE = 2.0  # times longer or shorter, that a single pass is believed


class Costs:
    """Seconds of a pass on an idle machine, by the rows and tokens that it reads.

    The load of the machine and longer texts are separated from the cost of more tokens, so that a pass can be compared
    to an earlier one. Sizes that were not measured are interpolated; new numbers of rows follow the nearest ones.

    Attributes:
        load: current time of passes, as a multiple of the idle machine's.
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
        self._rounds_on, self._use = 0, LEAST_USE

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
        if longest <= 0 or not self._comparable(rows) or self._rounds_on >= self._use:
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

    def _comparable(self, rows: int) -> bool:
        """Whether it is known what these rows cost without drafts: it was measured, or of about so many rows."""
        costs = self._costs
        if costs.times(rows, 1) >= MEASURED_FIRST:
            return True
        return costs.like(rows, MEASURED_FIRST) and costs.times_longer(rows) < TRUSTED

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

    def passed(self, drafted: int, waiting: int, seconds: float | None, drafting: float = 0.0) -> None:
        """A round was done, whose pass read a token of each row, and besides these.

        Args:
            drafted: of the row that had most.
            waiting: tokens that were read again.
            seconds: that a pass took, without drafting; None where it is unknown.
            drafting: seconds that drafting took.
        """
        rows, costs = len(self._rows), self._costs
        self._rounds_on = self._rounds_on + 1 if drafted else 0
        if seconds is not None:
            if not drafted and not waiting and costs.times(rows, 1):
                as_before = abs(seconds / (costs.of(rows, 1) * costs.load) - 1) < AS_BEFORE
                self._use = min(2 * self._use, MOST_USE) if as_before else LEAST_USE
            costs.note(rows, 1 + drafted + waiting, seconds)
        if drafted:
            self._drafting.setdefault(rows, deque(maxlen=REMEMBERED)).append(drafting / drafted / costs.load)
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

    def received(self, got: Sequence[Sequence[int]]) -> None:
        """Compares the tokens that each row received with its unused proposals, and counts the hits."""
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
        """What a round without drafts takes for so many rows; None where none was seen, nor of about so many."""
        costs = self._costs
        return costs.of(rows, 1) * costs.load if costs.times(rows, 1) or costs.like(rows, MEASURED_FIRST) else None
