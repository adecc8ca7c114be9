"""A prompt that is read chunk by chunk, from where somebody else's reading ends.

Decides after which chunks its caches are worth keeping. Knows nothing about where they are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_kv.generation import prefill_step
from mlx_kv.prefixes import Prefixes, needs_checkpoints

MOST_CHECKPOINTS = 32  # of one prompt: so at most a 32nd of it is read again


class PromptReader:
    """Reads a prompt chunk by chunk, from what a store has on, and keeps what is new.

    Args:
        model: or anything else that reads tokens (1, n) into caches.
        caches: new caches of the model, if the store has nothing.
        tokens: of the prompt, at least one; the last is left to be read, for the logits that come next.
        store: None reads all of it.
        step: tokens read at once; None is what the caches plan for.

    Attributes:
        caches: those that have read `read` tokens.
        reused: tokens that were in the store.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        caches: list[Any],
        tokens: Sequence[int],
        store: Prefixes | None = None,
        step: int | None = None,
    ) -> None:
        self.model, self.tokens, self.store = model, list(tokens), store
        found = None if store is None else store.find(tokens)
        self.caches, self.reused = (caches, 0) if found is None else found
        self.read = self._kept = self.reused
        self.step_size = prefill_step(self.caches, step)
        self._checkpoints = needs_checkpoints(self.caches)

    @property
    def done(self) -> bool:
        return self.read >= len(self.tokens) - 1

    def step(self) -> int:
        """Reads the next chunk, and returns how many tokens it had.

        Caches that cannot always be trimmed back to any prefix are kept on the way, others at the end.
        """
        chunk = self.tokens[self.read : min(self.read + self.step_size, len(self.tokens) - 1)]
        if chunk:
            self.model(mx.array([chunk]), cache=self.caches)
            mx.eval([cache.state for cache in self.caches])
            mx.clear_cache()
            self.read += len(chunk)
            if self.store is not None and self._worth_keeping():
                self.store.keep(self.tokens[: self.read], self.caches)
                self._kept = self.read
        return len(chunk)

    def _worth_keeping(self) -> bool:
        # On the way also where they still could go back: the next chunk may be the one after which they cannot.
        far = (self.read - self._kept) * MOST_CHECKPOINTS >= len(self.tokens)
        return self.done or (far and self._checkpoints)

    def finish(self) -> list[Any]:
        """Reads the rest, and returns the caches."""
        while not self.done:
            self.step()
        return self.caches
