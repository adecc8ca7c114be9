"""What was read of prompts, by the policy that it was read under: each has a place of its own, and all one limit.

Decides which policy's prompts leave when all together are too many. Knows nothing about rows, nor what a place holds.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from mlx_kv.policy import CachePolicy
from mlx_kv.server.tiered_prefixes import TieredPrefixes

MOST_POLICIES = 16  # whose prompts are kept at once


class KeptPrompts:
    """A `TieredPrefixes` for each policy, also while nobody is served under it.

    Args:
        max_bytes: of those that are in memory.
        make: makes a place.
    """

    def __init__(self, max_bytes: int, make: Callable[[Callable[[], str]], TieredPrefixes]) -> None:
        self.max_bytes, self._make = max_bytes, make
        self._places: OrderedDict[CachePolicy, TieredPrefixes] = OrderedDict()  # least recently used first

    def open(self, policy: CachePolicy, whose: Callable[[], str]) -> TieredPrefixes:
        """The place of a policy, that of before if there is one.

        Args:
            whose: tells its caches from others.
        """
        if policy not in self._places:
            self._places[policy] = self._make(whose)
        self._places.move_to_end(policy)
        return self._places[policy]

    def forget(self, used: set[CachePolicy]) -> None:
        """Lets places go where there are too many, none of which is used."""
        unused = [policy for policy in self._places if policy not in used]
        for policy in unused[: max(0, len(self._places) - MOST_POLICIES)]:
            threading.Thread(target=self._places.pop(policy).close, daemon=True).start()  # the disk may take its time

    @property
    def nbytes(self) -> int:
        """In memory, of all policies."""
        return sum(place.memory.nbytes for place in self._places.values())

    def fit(self, most: int | None = None) -> None:
        """Has leave what is more than the limit, or than `most` bytes: first of policies not used for long."""
        limit = self.max_bytes if most is None else max(0, min(self.max_bytes, most))
        excess = self.nbytes - limit
        for place in self._places.values():
            if excess <= 0:
                return
            before = place.memory.nbytes
            place.memory.shrink(max(0, before - excess))
            excess -= before - place.memory.nbytes

    def close(self) -> None:
        for place in self._places.values():
            place.close()
