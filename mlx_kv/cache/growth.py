"""Growth rules: the next capacity of a cache from the slots that it needs and those that it has. Integers only.

Capacities are multiples of 256, so that devices which compile attention per shape see few shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mlx_kv.settings import integer_fields

SLOT_MULTIPLE = 256
TAIL_MULTIPLE = 32  # behind shared first tokens: tails are short, and there are many
DOUBLED_TO = 1024  # below, fewer growths are worth the slack


def round_up(slots: int, multiple: int = SLOT_MULTIPLE) -> int:
    """The smallest multiple that holds `slots`."""
    return -(-slots // multiple) * multiple


class Growth(Protocol):
    """A rule for the next capacity. Third parties may bring their own."""

    def capacity(self, needed: int, current: int) -> int:
        """The new capacity in slots, at least `needed`, when `current` no longer suffices."""
        ...


@dataclass(frozen=True)
class Tapered:
    """Doubles up to 1,024 slots and takes half as many more from there on, but never more than `max_increment` at once.

    Beyond 1,024 slots, slack is at most half of what is held, and never more than `max_increment` slots. Where that is
    the limit, copies are no longer logarithmic in the length, and need not be: a cache that grows by I slots copies
    each token once for every I tokens that follow, while attention reads it for every one of them.

    Args:
        max_increment: most slots added in one growth, unless more are needed at once.

    Raises:
        ValueError: a limit below 256, the least that capacities differ by.
    """

    max_increment: int = 8192

    def __post_init__(self) -> None:
        integer_fields(self, "max_increment")
        if type(self.max_increment) is not int or self.max_increment < SLOT_MULTIPLE:
            raise ValueError(f"max_increment is {self.max_increment!r}: give a number of slots from {SLOT_MULTIPLE} up")

    def capacity(self, needed: int, current: int) -> int:
        increment = min(current, max(DOUBLED_TO // 2, current // 2), self.max_increment)
        return max(round_up(needed), current + increment // SLOT_MULTIPLE * SLOT_MULTIPLE)


@dataclass(frozen=True)
class Geometric:
    """Grows to `max(needed, factor * current)`: the number of copies is logarithmic in the length.

    Args:
        factor: what the capacity is multiplied by; above 1.
        max_increment: most slots added beyond the current capacity in one growth, unless more are needed at once.
        max_capacity: no slack is taken beyond this many slots. Tokens are never refused: past it, growth is exact.

    Raises:
        ValueError: a factor of 1 or less, or a limit below 1.
    """

    factor: float = 2.0
    max_increment: int | None = None
    max_capacity: int | None = None

    def __post_init__(self) -> None:
        integer_fields(self, "max_increment", "max_capacity")
        if not isinstance(self.factor, int | float) or not 1 < self.factor < float("inf"):
            raise ValueError(f"factor is {self.factor!r}: a capacity only grows with a factor above 1, such as 2")
        for name, limit in (("max_increment", self.max_increment), ("max_capacity", self.max_capacity)):
            if limit is not None and (type(limit) is not int or limit < 1):
                raise ValueError(f"{name} is {limit!r}: give a number of slots from 1 up, or None for no limit")

    def capacity(self, needed: int, current: int) -> int:
        capacity = int(self.factor * current)
        if self.max_increment is not None:
            capacity = min(capacity, current + self.max_increment)
        if self.max_capacity is not None:
            capacity = min(capacity, self.max_capacity)
        return round_up(max(needed, capacity))


@dataclass(frozen=True)
class FixedStep:
    """Grows to the next multiple of `step`, as mlx-lm does with 256: one copy of everything per step.

    Raises:
        ValueError: a step that is not a positive multiple of 256.
    """

    step: int = SLOT_MULTIPLE

    def __post_init__(self) -> None:
        integer_fields(self, "step")
        if type(self.step) is not int or self.step < 1 or self.step % SLOT_MULTIPLE:
            raise ValueError(f"step is {self.step!r}: give a positive multiple of {SLOT_MULTIPLE}")

    def capacity(self, needed: int, current: int) -> int:
        return round_up(needed, self.step)


DEFAULT: Growth = Tapered()
