"""What is measured, and what came out: settings, measurements, and their summary over seeds.

Decides which policies are compared, and what is said of several seeds. Knows nothing about models, tasks or arrays.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from mlx_kv.cache.codecs import Bits, Choice
from mlx_kv.cache.eviction.allocation import Scope
from mlx_kv.cache.eviction.calibration import FITTED, Calibration
from mlx_kv.cache.eviction.scores import find_score
from mlx_kv.policy import CALIBRATED, SINKS, CachePolicy, LayerAllocation

ALLOCATED = "@"  # between a score and its allocation
SHARES: dict[str, Scope] = {"pyramid": "layer", "calibrated": "head", "global": "adaptive"}
FEWER_ROWS = 8  # one in so many rows for a text and for attention: they answer at every token


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Args:
        budgets: tokens to keep. One of the context or more keeps everything.
        scores: names of scores, controls among them; NAME@LAYERS is one with another allocation than `layers`.
        rows: contexts of each seed; texts and attention take an eighth of them.
        context: tokens that are compressed.
        seeds: repetitions with other contexts, from seed 0 up.
        keep_recent, share, layers, bits, codec, residual_length, calibration: as in `CachePolicy`.
        seen: whether questions of a language model are seen when a context is compressed: one, or both in turns.
        rolling: whether caches of such tasks compact while a context is read, step by step, as they do in decoding.

    Raises:
        ValueError: an unknown score, a number below its least, and what `CachePolicy` refuses.
    """

    budgets: tuple[int, ...] = (64, 128, 256)
    scores: tuple[str, ...] = ("key_diff", "key_norm", "recent", "random", "key_norm_high")
    rows: int = 32
    context: int = 512
    seeds: int = 3
    keep_recent: int = 16
    share: Scope = None  # type: ignore[assignment]  # None is "layers", or what `layers` needs
    layers: LayerAllocation = "uniform"
    bits: Bits | None = None
    codec: Choice | None = None
    residual_length: int = 0
    seen: tuple[bool, ...] = (False,)
    rolling: bool = False
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("context", 1), ("seeds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number from {least} up")
        if self.share is None:
            object.__setattr__(self, "share", SHARES.get(str(self.layers), "layers"))
        for name in map(score_of, self.scores):
            if name != FITTED:
                find_score(name)
        if self.context <= SINKS + self.keep_recent:
            raise ValueError(
                f"context is {self.context}, but {SINKS} sinks and keep_recent={self.keep_recent} are kept anyway: "
                f"give a context from {SINKS + self.keep_recent + 1} up"
            )
        for budget in self.budgets:
            for name in ("recent@uniform", *self.scores):
                if self.calibration is not None or not self.needs_calibration(name):
                    self.policy(name, budget)

    def policy(self, score: str | None, budget: int | None, margin: int | None = None) -> CachePolicy:
        """What keeps `budget` tokens by a score, or everything. Without a margin, no context makes it evict."""
        if score is None or budget is None:
            return CachePolicy(bits=self.bits, codec=self.codec, residual_length=self.residual_length)
        _, at, layers = score.partition(ALLOCATED)
        return CachePolicy(
            bits=self.bits,
            codec=self.codec,
            residual_length=self.residual_length,
            budget=budget,
            score=score_of(score),
            keep_recent=self.keep_recent,
            share=SHARES.get(layers, "layers") if at else self.share,
            layers=cast(LayerAllocation, layers) if at else self.layers,
            margin=self.context if margin is None else margin,
            calibration=self.calibration if self.needs_calibration(score) else None,
        )

    def needs_calibration(self, score: str) -> bool:
        """Whether a score of `scores` is measured for each model, or its allocation is."""
        name, at, layers = score.partition(ALLOCATED)
        return name == FITTED or (layers if at else self.layers) == CALIBRATED

    def policies(self) -> list[tuple[str | None, int | None]]:
        """Each score at each budget, the full cache first."""
        return [(None, None), *((score, budget) for score in self.scores for budget in self.budgets)]

    @property
    def few_rows(self) -> int:
        return max(1, self.rows // FEWER_ROWS)


def score_of(label: str) -> str:
    """The name of the score in NAME or NAME@LAYERS."""
    return label.partition(ALLOCATED)[0]


@dataclass(frozen=True)
class Measurement:
    """One task under one policy with one seed.

    Attributes:
        task: "passkey", "recall 16", "perplexity, rolling", "attention of questions".
        unit: of the value: "accuracy", "nats per token" or "rank correlation".
        score, budget: None is the full cache; attention is measured without a budget.
        parts: the same for depths, quarters or layers, where a task has them.
    """

    task: str
    unit: str
    score: str | None
    budget: int | None
    seed: int
    value: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """All seeds of one task under one policy: mean and standard deviation (of a sample; None for one seed).

    Attributes:
        difference, difference_deviation: the same of what is left when the full cache's value is taken away, seed by
            seed. Texts differ more from seed to seed than policies do. 0 where there is no full cache to compare with.
        parts: means.
    """

    task: str
    unit: str
    score: str | None
    budget: int | None
    mean: float
    deviation: float | None
    difference: float
    difference_deviation: float | None
    parts: dict[str, float]


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def summary(measurements: Sequence[Measurement]) -> list[Result]:
    """Over the seeds, in the order of what came first."""
    groups: dict[tuple[str, str, str | None, int | None], list[Measurement]] = {}
    full = {(each.task, each.seed): each.value for each in measurements if each.score is None}
    for each in measurements:
        groups.setdefault((each.task, each.unit, each.score, each.budget), []).append(each)
    results = []
    for what, group in groups.items():
        lost = [each.value - full.get((each.task, each.seed), each.value) for each in group]
        parts = {name: statistics.fmean(each.parts[name] for each in group) for name in group[0].parts}
        spread = mean_and_deviation([each.value for each in group])
        results.append(Result(*what, *spread, *mean_and_deviation(lost), parts))
    return results
