"""Settings of an evaluation, its measurements, and their summary over seeds."""

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
from mlx_kv.settings import SettingError

ALLOCATED = "@"  # between a score and its allocation
SHARES: dict[str, Scope] = {"calibrated": "head"}
FEWER_ROWS = 8  # an eighth of the rows for texts and for attention, which have a value for every token


@dataclass(frozen=True)
class Settings:
    """The policies and contexts to measure.

    Args:
        budgets: tokens to keep; one of at least `context` tokens keeps everything.
        scores: names of scores, including controls; NAME@LAYERS sets another allocation than `layers`.
        rows: contexts per seed; an eighth of them for texts and attention.
        context: tokens that are compressed.
        seeds: repetitions with other contexts, from seed 0.
        keep_recent, share, layers, bits, codec, residual_length, calibration: as for `CachePolicy`.
        seen: whether questions of chat tasks are part of the compressed context: one of both, or both in turn.
        rolling: whether caches of chat tasks compact while the context is read, as in decoding.

    Raises:
        ValueError: an unknown score, a number below its minimum, and what `CachePolicy` refuses.
    """

    budgets: tuple[int, ...] = (64, 128, 256)
    scores: tuple[str, ...] = ("key_diff", "key_norm", "recent", "random", "key_norm_high")
    rows: int = 32
    context: int = 512
    seeds: int = 3
    keep_recent: int = 16
    share: Scope = None  # type: ignore[assignment]  # None: "layers", or what `layers` requires
    layers: LayerAllocation = "uniform"
    bits: Bits | None = None
    codec: Choice | None = None
    residual_length: int = 0
    seen: tuple[bool, ...] = (False,)
    rolling: bool = False
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "context", "seeds"):
            if getattr(self, name) < 1:
                raise SettingError(f"{{{name}:is}}: give a number from 1 up", **{name: getattr(self, name)})
        if self.share is None:
            object.__setattr__(self, "share", SHARES.get(str(self.layers), "layers"))
        for name in map(score_of, self.scores):
            if name != FITTED:
                find_score(name)
        if self.context <= SINKS + self.keep_recent:
            raise SettingError(
                "{context:is}, but {} sinks and {keep_recent:=} are kept anyway: give a context from {} up",
                *(SINKS, SINKS + self.keep_recent + 1),
                context=self.context,
                keep_recent=self.keep_recent,
            )
        for budget in self.budgets:
            for name in ("recent@uniform", *self.scores):
                if self.calibration is not None or not self.needs_calibration(name):
                    self.policy(name, budget)

    def policy(self, score: str | None, budget: int | None, margin: int | None = None) -> CachePolicy:
        """The policy of a score and a budget, or of the full cache; by default with a margin as long as the context."""
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
        """Whether a score, or its allocation, needs a calibration of the model."""
        name, at, layers = score.partition(ALLOCATED)
        return name == FITTED or (layers if at else self.layers) == CALIBRATED

    def policies(self) -> list[tuple[str | None, int | None]]:
        """The full cache, and each score at each budget."""
        return [(None, None), *((score, budget) for score in self.scores for budget in self.budgets)]

    @property
    def few_rows(self) -> int:
        return max(1, self.rows // FEWER_ROWS)


def score_of(label: str) -> str:
    """The score of NAME or NAME@LAYERS."""
    return label.partition(ALLOCATED)[0]


@dataclass(frozen=True)
class Measurement:
    """One task under one policy with one seed.

    Attributes:
        task: "passkey", "recall 16", "perplexity, rolling", "attention of questions".
        unit: "accuracy", "nats per token" or "rank correlation".
        score, budget: None is the full cache; correlations have no budget.
        parts: values for depths, quarters or layers, where a task has them.
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
    """All seeds of one task under one policy: mean and sample standard deviation (None for one seed).

    Attributes:
        difference, difference_deviation: of the differences to the full cache, seed by seed, since texts differ more
            between seeds than between policies. 0 without a full cache.
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
    """Results over the seeds, in the order of the first measurement of each."""
    groups: dict[tuple[str, str, str | None, int | None], list[Measurement]] = {}
    full = {(each.task, each.seed): each.value for each in measurements if each.score is None}
    for each in measurements:
        groups.setdefault((each.task, each.unit, each.score, each.budget), []).append(each)
    results = []
    for key, group in groups.items():
        differences = [each.value - full.get((each.task, each.seed), each.value) for each in group]
        parts = {name: statistics.fmean(each.parts[name] for each in group) for name in group[0].parts}
        spread = mean_and_deviation([each.value for each in group])
        results.append(Result(*key, *spread, *mean_and_deviation(differences), parts))
    return results
