"""Statistics of caches, summed over the layers of a model, and of speculation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_kv.cache.checks import cache_list
from mlx_kv.mlxlm.traverse import leaves, parts_of


@dataclass(frozen=True)
class CacheStatistics:
    """What the caches of one model hold, and what they did.

    Attributes:
        bytes_live: of tokens that attention can still read.
        bytes_allocated: dead slots included.
        bytes_full: what all tokens up to here would take, with none evicted or overwritten.
        growths: reallocations of the busiest layer.
        tokens_evicted: by all rows of the busiest layer.
        compactions: that the busiest row of the busiest layer took part in.
        compaction_seconds: of all layers together.
    """

    bytes_live: int
    bytes_allocated: int
    growths: int
    bytes_full: int
    tokens_evicted: int
    compactions: int
    compaction_seconds: float


def cache_statistics(caches: Iterable[Any]) -> CacheStatistics:
    """Sums over all layers; a cache that is not ours counts as wholly live.

    Raises:
        TypeError: something else than caches.
    """
    everything = list(leaves(cache_list("caches", caches)))
    layers = [parts_of(cache) for cache in everything]
    evictors = [[cache.evictor for cache in parts if cache.evictor is not None] for parts in layers]
    return CacheStatistics(
        bytes_live=sum(getattr(cache, "nbytes_live", cache.nbytes) for cache in everything),
        bytes_allocated=sum(cache.nbytes for cache in everything),
        growths=max((cache.growths for parts in layers for cache in parts), default=0),
        bytes_full=sum(getattr(cache, "nbytes_full", cache.nbytes) for cache in everything),
        tokens_evicted=max((sum(evictor.evicted for evictor in layer) for layer in evictors), default=0),
        compactions=max((evictor.compactions for layer in evictors for evictor in layer), default=0),
        compaction_seconds=sum(evictor.seconds for layer in evictors for evictor in layer),
    )


@dataclass
class SpeculationStatistics:
    """What one run did, filled in as it goes: verify rounds, tokens drafted, drafted tokens that were accepted.

    A round is one pass of the model for all rows; the tokens are of all rows together.

    Attributes:
        tokens: that rows got.
        seconds: that rounds took.
        without: seconds that the same tokens would have taken without drafts, by what such rounds took; None where
            there was none to compare with.
        length: tokens that were drafted for a row at the most, in the last round.
        drafter: its name.

    `caches` are those of the model, for `cache_statistics`.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    seconds: float = 0.0
    without: float | None = 0.0
    length: int = 0
    drafter: str = ""
    caches: list[Any] = field(default_factory=list)

    def note(self, drafted: Sequence[Sequence[int]], right: Sequence[int], seconds: float, alone: float | None) -> None:
        """Counts a round.

        Args:
            drafted: tokens of each row.
            right: how many of them were accepted.
            seconds: that it took.
            alone: seconds that a round without drafts takes; None where that is not known.
        """
        tokens = len(right) + sum(right)
        self.rounds += 1
        self.drafted += sum(map(len, drafted))
        self.accepted += sum(right)
        self.tokens += tokens
        self.seconds += seconds
        self.length = max(map(len, drafted), default=0)
        if self.length == 0:
            alone = seconds
        if self.without is not None:
            self.without = None if alone is None else self.without + alone * tokens / len(right)

    def figures(self) -> dict[str, float | int | str | None]:
        """What a summary tells, by name: counts, and ratios that are rounded."""
        return {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "passes": self.rounds,
            "tokens_per_pass": round(self.tokens_per_pass, 2),
            "draft_length": self.length,
            "draft_gain": None if self.gain is None else round(self.gain, 2),
            "drafter": self.drafter,
        }

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Of one row: the one that the model chose, and those of its draft that were right."""
        return self.tokens / (self.tokens - self.accepted) if self.tokens else 0.0

    @property
    def gain(self) -> float | None:
        """How many times as fast as without drafts; None where it was not measured."""
        return self.without / self.seconds if self.without is not None and self.seconds else None
