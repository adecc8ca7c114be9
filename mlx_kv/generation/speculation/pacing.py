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

DECAY = 0.98  # of older evidence, with each round that adds some about a row
FIRST_RATE = 0.7  # acceptance of a drafted token before any evidence
PRIOR_WEIGHT = 4.0  # tokens for which the prior counts; the prior of a row is the acceptance in all rows
BASELINE_ROUNDS = 2  # first rounds, without drafts: their cost is what all else is compared to
GUESSED_ROUNDS = 6  # rounds with drafts of a new number of rows until the cost without drafts is measured, not guessed
TRIAL_ROUNDS = 2  # rounds with drafts that test whether drafts pay again
MIN_WAIT, MAX_WAIT = 32, 1024  # rounds without drafts between two trials
MIN_USE, MAX_USE = 32, 256  # rounds with drafts between two measurements of a round without
COST_TOLERANCE = 0.2  # relative change of a pass's cost that counts as none

TOKEN_COST = 0.1  # guessed cost of each further token in a pass, relative to a pass of one token
COSTS_KEPT = 15  # passes of one size whose median is the cost of such a pass
LOAD_RATE = 0.5  # exponent with which a pass that is slower than others of its size raises the load
MAX_LOAD_STEP = 2.0  # factor by which a single pass can change the load, before that exponent


class Costs:
    """Seconds of a pass on an idle machine, by the rows and tokens that it reads.

    The load of the machine and longer texts are separated from the cost of more tokens, so that a pass can be compared
    to an earlier one. Sizes that were not measured are interpolated; new numbers of rows follow the nearest ones.

    Attributes:
        load: current time of passes, as a multiple of the idle machine's.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self.load = 1.0

    def record(self, rows: int, tokens: int, seconds: float) -> None:
        """A pass over so many tokens of each row took so many seconds."""
        costs = self._seconds.setdefault((rows, tokens), deque(maxlen=COSTS_KEPT))
        if costs:
            ratio = seconds / (median(costs) * self.load)
            self.load *= min(max(ratio, 1 / MAX_LOAD_STEP), MAX_LOAD_STEP) ** LOAD_RATE
        costs.append(seconds / self.load)

    def passes(self, rows: int, tokens: int) -> int:
        """Number of recent passes of this size."""
        return len(self._seconds.get((rows, tokens), ()))

    def draft_passes(self, rows: int) -> int:
        """Number of recent passes of so many rows and more than one token."""
        return sum(len(costs) for (count, tokens), costs in self._seconds.items() if count == rows and tokens > 1)

    def has_similar(self, rows: int, passes: int) -> bool:
        """Whether so many passes of one token were measured for about so many rows: half to twice."""
        return any(
            tokens == 1 and len(costs) >= passes and count <= 2 * rows <= 4 * count
            for (count, tokens), costs in self._seconds.items()
        )

    def of(self, rows: int, tokens: int) -> float:
        """The cost of a pass; without any measurement, relative to a pass of one token."""
        measured = self._measured(rows)
        guess = partial(self._guess, rows)
        return _interpolated(measured, tokens, guess) if measured else guess(tokens)

    def _guess(self, rows: int, tokens: int) -> float:
        """The cost by the measurements of the nearest other number of rows."""
        others = {count for count, _ in self._seconds} - {rows}
        if not others:
            return _guessed_cost(tokens)
        nearest = min(others, key=lambda count: (abs(count - rows), -count))
        return _interpolated(self._measured(nearest), tokens, _guessed_cost)

    def _measured(self, rows: int) -> dict[int, float]:
        return {tokens: median(costs) for (count, tokens), costs in self._seconds.items() if count == rows}


def _guessed_cost(tokens: int) -> float:
    return 1 + TOKEN_COST * (tokens - 1)


def _interpolated(measured: Mapping[int, float], tokens: int, guess: Callable[[int], float]) -> float:
    """Linear between two measured sizes, and beyond them in proportion to a guess."""
    if tokens in measured:
        return measured[tokens]
    below = max((size for size in measured if size < tokens), default=None)
    above = min((size for size in measured if size > tokens), default=None)
    if below is not None and above is not None:
        share = (tokens - below) / (above - below)
        return measured[below] + share * (measured[above] - measured[below])
    nearest = below or above
    assert nearest is not None, "a size is measured"
    return measured[nearest] * guess(tokens) / guess(nearest)


class Acceptance:
    """The recent acceptance rate of drafted tokens, at each place of a draft.

    Args:
        max_tokens: of a draft.
    """

    def __init__(self, max_tokens: int) -> None:
        self._right, self._tried = [0.0] * max_tokens, [0.0] * max_tokens

    def record(self, drafted: int, right: int) -> None:
        """So many tokens were drafted, and the first `right` of them were accepted."""
        self._right = [DECAY * count for count in self._right]
        self._tried = [DECAY * count for count in self._tried]
        for place in range(min(drafted, right + 1)):
            self._tried[place] += 1
            self._right[place] += place < right

    def chances(self, prior: Sequence[float] = ()) -> list[float]:
        """For each place, the probability that its token is right if those before it are."""
        chances: list[float] = []
        guess = FIRST_RATE
        for place, (right, tried) in enumerate(zip(self._right, self._tried, strict=True)):
            guess = prior[place] if prior else guess
            guess = (right + PRIOR_WEIGHT * guess) / (tried + PRIOR_WEIGHT)
            chances.append(guess)
        return chances


class Pace:
    """The number of tokens that are drafted for each round.

    Args:
        max_tokens: of a draft.
        free: whether drafts cost nothing: then they are made in any case, and judged also where they are not used.
        fixed: whether drafts always have the maximum length.
        replays: whether a row with a wrong token reads the right tokens of that pass again.

    Attributes:
        length: the length that was chosen last.
    """

    def __init__(self, max_tokens: int, free: bool, fixed: bool = False, replays: bool = False) -> None:
        self.max_tokens, self.free, self.fixed, self.replays = max_tokens, free, fixed, replays
        self.length = max_tokens if fixed else 0
        self._sizes = sorted({0, *(size for size in (1, 2, 4, 8, 16, 32, 64) if size < max_tokens), max_tokens})
        self._all, self._rows = Acceptance(max_tokens), list[Acceptance]()
        self._costs, self._drafting = Costs(), dict[int, deque[float]]()
        self._unused: list[tuple[list[int], int] | None] = []  # drafts that were not used: tokens, matched so far
        self._rounds_off, self._wait, self._trials = 0, MIN_WAIT, 0
        self._rounds_on, self._use = 0, MIN_USE

    # --- rows -----------------------------------------------------------------------------------------------------

    def join(self, rows: int) -> None:
        """Appends new rows."""
        self._rows += [Acceptance(self.max_tokens) for _ in range(rows)]
        self._unused += [None] * rows

    def keep(self, rows: Sequence[int]) -> None:
        """Removes all other rows."""
        self._rows = [self._rows[row] for row in rows]
        self._unused = [self._unused[row] for row in rows]

    # --- the choice -----------------------------------------------------------------------------------------------

    def choose(self, limit: int, waiting: int = 0, proposed: Sequence[int] | None = None) -> int:
        """Tokens to draft for each row in the round that comes; 0 drafts nothing.

        Args:
            limit: maximum that the rows can use.
            waiting: tokens that the pass reads again besides.
            proposed: length of the draft of each row, where drafts are free.
        """
        rows = len(self._rows)
        longest = min(limit, self.max_tokens) if proposed is None else min(limit, max(proposed, default=0))
        if self.fixed:
            return longest
        if longest <= 0 or not self._comparable(rows) or self._rounds_on >= self._use:
            return 0
        if self._trials:
            self.length = min(2, longest)  # few, and enough to tell whether more would pay
            return self.length
        sizes = [size for size in self._sizes if size < longest] + [longest]
        speeds = {size: self._speed(size, waiting, proposed) for size in sizes}
        self.length = max(sizes, key=lambda size: (speeds[size], -size))
        if self.length == 0 and not self.free:
            self._rounds_off += 1
            if self._rounds_off >= self._wait:
                self._rounds_off, self._trials, self._wait = 0, TRIAL_ROUNDS, min(2 * self._wait, MAX_WAIT)
        elif self.length:
            self._rounds_off, self._wait = 0, MIN_WAIT
        return self.length

    def _comparable(self, rows: int) -> bool:
        """Whether the cost without drafts is known, measured for these rows or for about so many."""
        costs = self._costs
        if costs.passes(rows, 1) >= BASELINE_ROUNDS:
            return True
        return costs.has_similar(rows, BASELINE_ROUNDS) and costs.draft_passes(rows) < GUESSED_ROUNDS

    def _speed(self, size: int, waiting: int, proposed: Sequence[int] | None) -> float:
        """Expected tokens per second of a round that drafts so many."""
        rows = len(self._rows)
        prior = self._all.chances()
        gained, again = float(rows), 0.0
        for row, acceptance in enumerate(self._rows):
            count = size if proposed is None else min(size, proposed[row])
            right = list(accumulate(acceptance.chances(prior)[:count], mul))
            gained += sum(right)
            if self.replays and right:  # what a wrong token has the next pass read again, of the row that has most
                again = max(again, (1 - right[-1]) * (1 + waiting + sum(right)))
        alone, passing = self._costs.of(rows, 1), self._costs.of(rows, size + 1 + waiting)
        seconds = self._drafting.get(rows)  # of one token of each row
        drafting = 0.0 if self.free else size * (median(seconds) if seconds else TOKEN_COST * alone)
        a_token = max(0.0, passing - alone) / max(1, size + waiting)
        return gained / (passing + drafting + again * a_token)

    # --- measurements ---------------------------------------------------------------------------------------------

    def record_pass(self, drafted: int, waiting: int, seconds: float | None, drafting: float = 0.0) -> None:
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
            if not drafted and not waiting and costs.passes(rows, 1):
                change = abs(seconds / (costs.of(rows, 1) * costs.load) - 1)
                self._use = min(2 * self._use, MAX_USE) if change < COST_TOLERANCE else MIN_USE
            costs.record(rows, 1 + drafted + waiting, seconds)
        if drafted:
            self._drafting.setdefault(rows, deque(maxlen=COSTS_KEPT)).append(drafting / drafted / costs.load)
            self._trials = max(0, self._trials - 1)

    def record_acceptance(self, drafted: Sequence[int], right: Sequence[int]) -> None:
        """Of so many drafted tokens of each row, so many were right."""
        for row, (count, hits) in enumerate(zip(drafted, right, strict=True)):
            self._record(row, count, hits)

    def _record(self, row: int, drafted: int, right: int) -> None:
        if drafted:
            self._rows[row].record(drafted, right)
            self._all.record(drafted, right)

    def add_unused(self, proposals: Sequence[Sequence[int]]) -> None:
        """Drafts that are not used: `match_unused` judges them as the tokens come."""
        for row, tokens in enumerate(proposals):
            if tokens and self._unused[row] is None:
                self._unused[row] = list(tokens), 0

    def match_unused(self, received: Sequence[Sequence[int]]) -> None:
        """Compares the tokens that each row received with its unused proposals, and counts the hits."""
        for row, tokens in enumerate(received):
            for token in tokens:
                unused = self._unused[row]
                if unused is None:
                    break
                draft, right = unused
                if draft[right] == token and right + 1 < len(draft):
                    self._unused[row] = draft, right + 1
                    continue
                self._unused[row] = None
                self._record(row, len(draft), right + (draft[right] == token))

    def seconds_without(self, rows: int) -> float | None:
        """Seconds of a round without drafts; None where neither these rows nor about so many were measured."""
        costs = self._costs
        known = costs.passes(rows, 1) or costs.has_similar(rows, BASELINE_ROUNDS)
        return costs.of(rows, 1) * costs.load if known else None
