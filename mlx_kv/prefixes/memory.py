"""Processed prompts in memory: the nearest place to find one again.

Decides what leaves when there is too much. Its caches share their buffers with those that it was shown and those that
it hands out, until one of them is written to: keeping and finding cost nothing, going on costs one copy.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import Any

from mlx_kv.cache.checks import whole_number
from mlx_kv.generation.statistics import cache_statistics
from mlx_kv.mlxlm.trimming import trim_prompt_cache
from mlx_kv.prefixes.index import PrefixIndex, packed
from mlx_kv.prefixes.place import PromptPlace


class PromptMemory(PromptPlace):
    """Processed prompts, up to so many bytes.

    Args:
        max_bytes: allocated by all of them; what was of no use for longest leaves first. 0 keeps nothing.
        fingerprint: whose caches these are; None leaves it to the first `PromptReader`. A reader of another model or
            policy is refused.

    Raises:
        ValueError: max_bytes below 0; whenever prompts are asked for or kept, that nobody has said whose they are.
    """

    def __init__(self, max_bytes: int = 2**30, fingerprint: str | None = None) -> None:
        super().__init__(whole_number("max_bytes", max_bytes), fingerprint)
        self._index, self._names = PrefixIndex(), count()
        self._caches: OrderedDict[str, list[Any]] = OrderedDict()  # least recently used first
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._caches)

    def _best(self, tokens: Sequence[int]) -> tuple[str, int] | None:
        self._owner()
        return self._index.best(packed(tokens))

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        """The caches that have read most of a prompt, all but its last token at the most, and how many tokens of it.

        They are the caller's own. None where nothing serves.
        """
        best = self._best(tokens)
        if best is None:
            return None
        name, found = best
        caches = copy.deepcopy(self._caches[name])
        trim_prompt_cache(caches, len(self._index[name]) - found)
        self._caches.move_to_end(name)
        return caches, found

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> bool:
        """Keeps the caches that have read exactly these tokens, unless an entry serves as well; says whether it did.

        They should be evaluated: otherwise they hold on to whatever they will be computed from.
        """
        self._owner()
        entry = self._entry(tokens, caches, cache_statistics(caches).bytes_allocated)
        if entry is None:
            return False
        covering = self._index.covering(entry)
        if covering is not None:
            self._caches.move_to_end(covering)
            return False
        name, copied = str(next(self._names)), copy.deepcopy(list(caches))  # from here on, nothing can fail
        for superfluous in self._index.covered(entry):
            self._remove(superfluous)
        self._index.add(name, entry)
        self._caches[name] = copied
        self.nbytes += entry.bytes
        while self.nbytes > self.max_bytes:
            self._remove(next(iter(self._caches)))
        return True

    def _remove(self, name: str) -> None:
        self.nbytes -= self._index[name].bytes
        self._index.remove(name)
        del self._caches[name]
