"""What speculation did, counted as it goes. Knows nothing about models or rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SpeculationStatistics:
    """What one run did, filled in as it goes: verify rounds, tokens drafted, drafted tokens that were accepted.

    A round is one pass of the model for all rows; the tokens are of all rows together.

    `caches` are those of the model, for `cache_statistics`.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    caches: list[Any] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0
