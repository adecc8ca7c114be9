"""Who holds which block, and how many bytes that is: a block that several entries hold counts once.

Bookkeeping alone: knows nothing about what a block is, where it lies, nor which entry is to go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

B = TypeVar("B")


class Holdings(Generic[B]):
    """Entries by name, and the blocks that each of them holds.

    Attributes:
        nbytes: of all entries together, each block once.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, Mapping[B, int]]] = {}
        self._holders: Counter[B] = Counter()
        self.nbytes = 0

    def __contains__(self, block: object) -> bool:
        """Whether anybody holds a block."""
        return block in self._holders

    @property
    def blocks(self) -> Collection[B]:
        """All that are held, as long as nothing changes."""
        return self._holders.keys()

    def add(self, name: str, own: int, blocks: Mapping[B, int]) -> None:
        """An entry that was not there.

        Args:
            own: bytes that are its alone, beside the blocks.
            blocks: that it holds, and the bytes of each.
        """
        self._held[name] = own, blocks
        self.nbytes += own + sum(size for block, size in blocks.items() if block not in self._holders)
        self._holders.update(blocks.keys())

    def remove(self, name: str) -> list[B]:
        """Lets go of an entry, if it is there; returns the blocks that nobody holds any longer."""
        own, blocks = self._held.pop(name, (0, {}))
        free = [block for block in blocks if self._holders[block] == 1]
        self._holders -= Counter(blocks.keys())
        self.nbytes -= own + sum(blocks[block] for block in free)
        return free
