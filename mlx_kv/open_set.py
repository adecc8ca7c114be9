"""Sets that can be extended: built-in entries, registered ones, and those of packages with entry points.

Scores, codecs and drafters are such sets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

Member = TypeVar("Member")


class OpenSet(Generic[Member]):
    """Things of one kind and the names under which they are found.

    Args:
        kind: what one of them is called: the entry points are of the group `mlx_kv.<kind>s`, and what registers one is
            `register_<kind>`.
        alternative: what a caller can give instead of a name.
        ours: those of this package.
        read: makes a member of the name of an entry point and of the object that it loads.
    """

    def __init__(
        self,
        kind: str,
        alternative: str,
        ours: Mapping[str, Member],
        read: Callable[[str, Any], Member] = lambda name, loaded: loaded,
    ) -> None:
        self.kind, self.group, self._alternative, self._read = kind, f"mlx_kv.{kind}s", alternative, read
        self.registered = dict(ours)
        self._loaded: dict[str, Member] = {}

    @cached_property
    def entries(self) -> dict[str, EntryPoint]:
        """Of other packages, looked for once."""
        return {entry.name: entry for entry in entry_points(group=self.group)}

    def names(self) -> list[str]:
        """All that `find` finds."""
        return sorted({*self.entries, *self.registered})

    def find(self, name: str) -> Member:
        """The one of a name: what was registered comes before what other packages bring.

        That is loaded when it is asked for: a package whose one cannot be used is in the way of no other.

        Raises:
            ValueError: none has this name.
        """
        if not isinstance(name, str):
            raise ValueError(f"{self.kind} is {name!r}: give a name, or {self._alternative}")
        if name in self.registered:
            return self.registered[name]
        if name not in self.entries:
            raise ValueError(
                f"there is no {self.kind} {name!r}: choose one of {', '.join(self.names())}, give {self._alternative}, "
                f"or register_{self.kind}() one of that name"
            )
        if name not in self._loaded:
            self._loaded[name] = self._read(name, self.entries[name].load())
        return self._loaded[name]
