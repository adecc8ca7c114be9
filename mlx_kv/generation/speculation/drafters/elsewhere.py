"""The drafter of ranks that follow: who drafts is with the leader, and what he proposes is told.

Decides nothing, has no caches, and is never asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_kv.generation.speculation.acceptance import Choice
from mlx_kv.generation.speculation.drafters.protocol import Drafter


class Elsewhere(Drafter):
    """Stands for a drafter of another process.

    Args:
        step_size, equal_rows: of that one.
    """

    def __init__(self, step_size: int | None, equal_rows: bool) -> None:
        self.step_size, self.equal_rows = step_size, equal_rows

    def join(self, prompts: Sequence[Sequence[int]], caches: list[Any]) -> None: ...

    def keep(self, rows: Sequence[int]) -> None: ...

    def propose(self, most: int, choice: Choice) -> Sequence[Sequence[int]]:
        raise AssertionError("the leader drafts")

    def read(self, rows: Sequence[Sequence[int]], caches: list[Any]) -> None: ...

    def accepted(self, tokens: Sequence[Sequence[int]]) -> None: ...
