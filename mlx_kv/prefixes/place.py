"""A place that keeps processed prompts: what is asked of any, and what memory and a directory have in common.

Decides whose caches a place keeps (of the model and the policy that it was told when it was made, else of its first
reader), and which are worth keeping at all. Knows nothing about where they are kept, nor what leaves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mlx_kv.prefixes.index import LEAST_SHARED, Entry, packed
from mlx_kv.prefixes.parts import Alone, Measure, Parts
from mlx_kv.prefixes.serving import least_tokens


class Prefixes(Protocol):
    """Somebody who keeps processed prompts."""

    def bind(self, find: Callable[[], str]) -> None:
        """Is told, if need be, whose caches these are: `find` works it out."""
        ...

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        """The asker's own caches, which have read the first tokens of these, and how many: never all of them."""
        ...

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> object:
        """Is shown caches that have read exactly these tokens."""
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
