"""A place that keeps processed prompts: what is asked of any, and what memory and a directory have in common.

A place keeps caches of one model and policy: those given when it was made, or else those of its first reader. Which
caches can serve a prompt depends on how far they can be trimmed exactly, and on how they are stored.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mlx_kv.cache.codecs import are_plain, in_words
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import NO_LIMIT, Row, planned
from mlx_kv.mlxlm.traverse import is_ours, kind_of, leaves
from mlx_kv.prefixes.index import LEAST_SHARED, Entry, packed
from mlx_kv.prefixes.parts import Alone, Measure, Parts


class Prefixes(Protocol):
    """What finds and keeps processed prompts."""

    def bind(self, find: Callable[[], str]) -> None:
        """Sets, if it is not set, of which model and policy these caches are: `find` works it out."""
        ...

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        """Caches of the caller's own, which have read the first tokens of these, and how many: never all of them."""
        ...

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> object:
        """Keeps caches that have read exactly these tokens, or some of them, or none."""
        ...


class PromptPlace(ABC):
    """Keeps the processed prompts of one model and policy. Abstract: memory and directories say how.

    Args:
        max_bytes: that it keeps.
        fingerprint: of model and policy; None leaves it to the first reader.
        parts: the other ranks, where each has a part of the caches.
    """

    def __init__(self, max_bytes: int, fingerprint: str | None, parts: Parts | None) -> None:
        self.max_bytes, self._parts = max_bytes, Alone() if parts is None else parts
        self._given, self._found = fingerprint, fingerprint

    @property
    def fingerprint(self) -> str | None:
        """Whose caches these are, as far as is known."""
        return self._found

    def bind(self, find: Callable[[], str]) -> None:
        """Keeps to the model and the policy of a first reader, unless a fingerprint was given.

        Raises:
            ValueError: there was another reader, of another model or policy.
        """
        if self._given is not None:
            return
        found, place = self._parts.fingerprint(find()), type(self).__name__
        if self._found not in (None, found):
            raise ValueError(f"this {place} keeps caches of another model or policy: give each a {place} of its own")
        self._found = found

    def _owner(self) -> str:
        """Whose caches these are. Raises ValueError if nobody has said."""
        if self._found is None:
            place = type(self).__name__
            raise ValueError(
                f"this {place} does not know whose caches it keeps: read with a PromptReader, or give "
                f"{place}(..., fingerprint=...), such as that of mlx_kv.files.fingerprint.model_fingerprint"
            )
        return self._found

    def serves(self, tokens: Sequence[int]) -> int:
        """How many tokens of a prompt this place would come with, by what it knows of its entries now."""
        best = self._best(tokens)
        return 0 if best is None else best[1]

    @abstractmethod
    def _best(self, tokens: Sequence[int]) -> tuple[str, int] | None:
        """The entry that stands for most of a prompt, and for how many of its tokens."""

    def _entry(self, tokens: Sequence[int], caches: Sequence[Any], measure: Measure, nbytes: int) -> Entry | None:
        """The entry that caches of so many bytes would become; None if it is not worth it, or more than all may be."""
        key = packed(tokens)
        count = len(key) // 4
        if count < LEAST_SHARED or nbytes > self.max_bytes:
            return None
        nbytes, least = self._parts.most(caches, count, measure, nbytes, least_tokens(caches, count))
        return None if nbytes > self.max_bytes else Entry(key, nbytes, least)


def least_tokens(caches: Sequence[Any], held: int) -> int:
    """How few of `held` tokens caches can be trimmed back to exactly, all layers together."""
    most = held
    for cache in leaves(caches):
        if is_ours(cache):
            exact = [_exact_trim(cache, row, index) for index, row in enumerate(cache.view.rows)]
            most = min(most, *map(min, exact, cache.most_trims))
        elif not cache.is_trimmable():
            most = 0
    return held - most


def _exact_trim(cache: KVCache, row: Row, index: int) -> int:
    """Tokens that can be taken back to where a fresh read of the rest would stand.

    With a budget not beyond the last compaction: what was evicted then may have gone for the sake of later tokens. Nor
    further than what was seen of attention can be.
    """
    if cache.evictor is None:
        return cache.layout.most_trim(row)
    held, budget = cache.layout.held(row), cache.evictor.layout.budget
    most = max(0, held - budget) if row.evicted > 0 else cache.layout.most_trim(row)
    seen = cache.evictor.observation
    return most if seen is None or index >= len(seen.ends) else min(most, seen.most_trim(index))


def kept_how(caches: Sequence[Any]) -> str:
    """How caches keep keys and values, in words: only those that say the same may stand in for each other."""
    return "; ".join(_how(cache) if is_ours(cache) else kind_of(cache).__name__ for cache in leaves(caches))


def mark_of_drafts(own: Sequence[Any], plain: Sequence[Any]) -> list[str]:
    """What tells the caches of whom text is drafted for from others, if anything: rings have room for drafts then."""
    how = kept_how(own)
    return [] if how == kept_how(plain) else [hashlib.blake2b(how.encode(), digest_size=8).hexdigest()]


def _how(cache: KVCache) -> str:
    keeps, view = [" ".join(map(str, planned(cache.layout).parameters))], cache.view
    if not are_plain(view.codecs):
        keeps.append(f"{in_words(view.codecs)} from {view.quantized_start}")
        if view.residual_length:
            keeps.append(f"but the newest {view.residual_length}")
    if cache.evictor is not None:
        keeps.append(f"by {cache.evictor.score.name} for each {cache.evictor.granularity}")
        layers = cache.evictor.layers
        if not isinstance(layers, str):
            keeps.append(f"by table {hashlib.blake2b(repr(layers).encode(), digest_size=8).hexdigest()}")
        elif layers == "global":
            keeps.append("in one ranking of all layers")
    return ", ".join(keeps)


def needs_checkpoints(caches: Sequence[Any]) -> bool:
    """Whether caches will come to where they cannot be trimmed back to any prefix."""
    return not all(
        is_ours(cache) and cache.layout.enough_slots == NO_LIMIT and not cache.view.residual_length
        for cache in leaves(caches)
    )
