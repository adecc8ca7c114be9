"""A place that keeps processed prompts: what memory and a directory have in common.

Decides whose caches a place keeps (of the model and the policy that it was told when it was made, else of its first
reader), and which are worth keeping at all. Knows nothing about where they are kept, nor what leaves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from mlx_kv.prefixes.index import LEAST_SHARED, Entry, least_tokens, packed


class PromptPlace(ABC):
    """Args:
    max_bytes: that it keeps.
    fingerprint: of model and policy; None leaves it to the first reader.
    """

    def __init__(self, max_bytes: int, fingerprint: str | None) -> None:
        self.max_bytes = max_bytes
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
        found, place = find(), type(self).__name__
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

    def _entry(self, tokens: Sequence[int], caches: Sequence[Any], size: int) -> Entry | None:
        """The entry that caches of so many bytes would become; None if it is not worth it, or more than all may be."""
        if len(tokens) < LEAST_SHARED or size > self.max_bytes:
            return None
        return Entry(packed(tokens), size, least_tokens(caches, len(tokens)))
