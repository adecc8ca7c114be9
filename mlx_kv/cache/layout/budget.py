"""A budget of tokens: when a compaction is due, how many tokens it leaves, and in which slots. Integers only.

Which tokens are evicted is decided in `cache.eviction`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from mlx_kv.cache.layout.append import InOrder
from mlx_kv.cache.layout.base import Row, check_room, room_parameters, with_room
from mlx_kv.settings import SettingError

KEEP_RECENT = 64


def default_keep_recent(budget: int, residual: int = 0) -> int:
    """At most a quarter of the budget, so that a small one has room for other tokens, but all of a residual."""
    return min(KEEP_RECENT, max(budget // 4, residual))


@dataclass(frozen=True, slots=True)
class Budget(InOrder):
    """A row of more than budget + margin tokens is compacted to exactly the budget before its next write.

    The first `sinks` tokens and the newest `keep_recent` are never evicted. Before slot budget - keep_recent (the cut)
    survivors lie in any order; from there on tokens are in the order of positions, so a trim can go back to the cut.
    Where heads keep different numbers of tokens, the recent block begins at the cut of the longest head (`cut_of`), and
    the slots between a shorter head's own tokens and that cut are dead.

    Args:
        margin: how far the budget may be overshot before a compaction; None is max(64, budget // 16).
        max_write: the longest write to plan for; memory peaks at budget + margin + max_write slots.
        room: the longest write that currently has slots; 0 is max_write.

    Raises:
        ValueError: a number below its least, or a budget that sinks and recent tokens would fill.
    """

    budget: int
    keep_recent: int = KEEP_RECENT
    sinks: int = 4
    margin: int | None = None
    max_write: int = 512
    room: int = 0
    max_rollback: ClassVar[int] = 0  # keep_recent bounds trims

    def __post_init__(self) -> None:
        for name, least in (("budget", 1), ("keep_recent", 0), ("sinks", 0), ("margin", 0), ("max_write", 1)):
            value = getattr(self, name)
            if (value is not None or name != "margin") and (type(value) is not int or value < least):
                raise SettingError(f"{{{name}:is}}: give a whole number of tokens from {least} up", **{name: value})
        object.__setattr__(self, "room", check_room(self.room, self.max_write))
        if self.budget <= self.sinks + self.keep_recent:
            raise SettingError(
                "{budget:is}, but {} sinks and {keep_recent:=} are kept: give a budget from {} up, or keep fewer of "
                "them",
                *(self.sinks, self.sinks + self.keep_recent + 1),
                budget=self.budget,
                keep_recent=self.keep_recent,
            )

    @property
    def slack(self) -> int:
        """Tokens above the budget that are allowed: the margin, or its default."""
        return max(64, self.budget // 16) if self.margin is None else self.margin

    @property
    def most_held(self) -> int:
        """Tokens of a row up to which no compaction is due."""
        return self.budget + self.slack

    @property
    def enough_slots(self) -> int:
        return self.most_held + self.room

    def with_room(self, room: int) -> Self:
        return with_room(self, room)

    @property
    def cut(self) -> int:
        """The slot where, after a compaction, the recent block begins."""
        return self.budget - self.keep_recent

    @property
    def parameters(self) -> tuple[str | int, ...]:
        numbers = self.budget, self.keep_recent, self.sinks, self.slack, self.max_write
        return "budget", *numbers, *room_parameters(self)[1:]

    def cut_of(self, row: Row) -> int:
        """The cut of a row, in which one head may hold more than the budget, and others less."""
        return self.cut + row.extra_slots

    def due(self, row: Row) -> bool:
        """Whether a row is to be compacted before its next write."""
        return self.held(row) > self.most_held

    def before_due(self, row: Row) -> int:
        """The longest next write that delays no compaction, compared to the same tokens written one by one."""
        return self.most_held + 1 - self.held(self.compacted_if_due(row))

    def compacted(self, row: Row, extra_slots: int = 0) -> Row:
        """The row after a compaction to exactly the budget.

        Args:
            extra_slots: `Row.extra_slots` after the compaction.
        """
        return row._replace(start=self.budget + extra_slots - row.offset, extra_slots=extra_slots, shared=0)

    def compacted_if_due(self, row: Row) -> Row:
        return self.compacted(row) if self.due(row) else row

    def ordered_from(self, row: Row) -> int:
        """The position at the cut, before which survivors lie in any order; 0 as long as nothing was evicted."""
        return 0 if row.evicted <= 0 else self.cut_of(row) - row.start

    def most_trim(self, row: Row) -> int:
        """All, as long as nothing was evicted; then back to the cut."""
        return row.offset - self.ordered_from(row)

    def refusal(self, count: int, most: int) -> tuple[str, str]:
        more = self.keep_recent + count - most
        return "has evicted tokens from before its recent ones", f"keep more of them with keep_recent={more}"

    def held(self, row: Row) -> int:
        """The mean over all heads of all layers, a whole number."""
        return row.end - row.extra_slots + row.shared
