"""What was measured of one model for its budgets: how many tokens each head needs, and weights that predict a score.

L layers of full attention, H KV heads, Dk and Dv head dims of keys and values, n tokens, F features of a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx

from mlx_kv.cache.checks import check_type
from mlx_kv.cache.eviction.allocation import HeadBudgets, head_budgets
from mlx_kv.cache.eviction.scores import MEASURED, Score
from mlx_kv.cache.eviction.scores.fitted import FittedLayer, fitted_score
from mlx_kv.settings import SettingError

FITTED = "fitted"
SCORE_PREFIX = f"{FITTED}:"


@dataclass(frozen=True, eq=False)
class Calibration:
    """Measurements of one model, as `mlx_kv.calibrate` makes them and a `.kvcal.safetensors` file stores them.

    Two calibrations are equal if they have the same `name`, a digest of all numbers.

    Attributes:
        fingerprint: of the model, without a tokenizer (`files.fingerprint.model_fingerprint`).
        heads: (L, H), tokens that each head is given, as a multiple of the mean over all heads.
        layers: of each layer, the weights of the fitted score; empty if only budgets were measured.
        details: versions, texts, tokens and the quality of the fit; anything that JSON can hold.

    Raises:
        TypeError: an argument of another type.
        ValueError: budgets that are no table of finite numbers from 0 up, or weights for another number of layers.
    """

    fingerprint: str
    heads: HeadBudgets
    layers: tuple[FittedLayer, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_type("fingerprint", self.fingerprint, str, "give that of a model, 32 hex digits")
        check_type("layers", self.layers, tuple, "give a tuple of the weights of each layer")
        check_type("details", self.details, Mapping, "give a dict of what JSON can hold")
        if not all(isinstance(layer, FittedLayer) for layer in self.layers):
            raise TypeError(
                "layers has an element that is not a FittedLayer: give those of mlx_kv.calibrate or of a file"
            )
        object.__setattr__(self, "heads", head_budgets(self.heads))
        if self.layers and len(self.layers) != len(self.heads):
            raise ValueError(
                f"got budgets for {len(self.heads)} layers and weights for {len(self.layers)}: give as many of both"
            )
        if self.layers:
            MEASURED[self.score.name] = self.score  # loaded caches find their score by its name

    @cached_property
    def name(self) -> str:
        """12 hex digits of a digest of all numbers."""
        sealed = hashlib.blake2b(repr((self.fingerprint, self.heads)).encode(), digest_size=6)
        for layer in self.layers:
            for array in layer.arrays.values():
                sealed.update(memoryview(array))  # type: ignore[arg-type]
        return sealed.hexdigest()

    @cached_property
    def score(self) -> Score:
        """The fitted score, registered under "fitted:" and `name`.

        Raises:
            ValueError: only budgets were measured.
        """
        if not self.layers:
            raise SettingError(
                "this calibration has budgets of heads alone, and no weights for {score:='fitted'}: run mlx-kv "
                "calibrate without --budgets-only"
            )
        return Score(SCORE_PREFIX + self.name, fitted_score(self.layers), per_token=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Calibration) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Calibration({self.name})"


def as_arrays(layers: Sequence[FittedLayer]) -> dict[str, mx.array]:
    """All weights by name, for a file."""
    return {f"layers.{i}.{name}": array for i, layer in enumerate(layers) for name, array in layer.arrays.items()}
