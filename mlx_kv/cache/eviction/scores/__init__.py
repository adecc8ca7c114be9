"""Scores of tokens, higher is kept: their formulas, and the names under which they are found.

A score is a function of n tokens of each row and head,

    (tokens: ScoredTokens) -> (B, H, n), float32

with keys, values and positions as its fields. Only the order of what it returns matters; it must be finite.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_kv.cache.eviction.scores.attention import SNAP_QUERIES, expected_attention, h2o, kvzip, snap_kv, tova
from mlx_kv.cache.eviction.scores.stored import (
    key_diff,
    key_norm,
    key_norm_high,
    key_value,
    lag_kv,
    random,
    recent,
    value_norm,
)
from mlx_kv.cache.eviction.scores.tokens import AttentionInputs, ScoredTokens, Wants
from mlx_kv.open_set import OpenSet

Function = Callable[[ScoredTokens], mx.array]


@dataclass(frozen=True)
class Score:
    """A score function and its properties.

    Attributes:
        name: by which it is found, also when a saved cache is loaded.
        function: (tokens) -> (B, H, n), float32.
        per_token: whether the score of a token depends only on itself and its neighbours in the text. Then it is
            computed once, for runs of new tokens in order; otherwise for all live tokens at every compaction.
        wants: what it uses of attention; None where it uses only keys, values and positions.

    Raises:
        ValueError: a function that cannot be called with one argument, or one of attention that is per_token.
    """

    name: str
    function: Function
    per_token: bool = False
    wants: AttentionInputs | None = None

    def __post_init__(self) -> None:
        if self.per_token and self.wants is not None and self.wants.observes:
            raise ValueError(
                f"the score {self.name} wants to see attention, which changes with what follows a token: "
                "leave per_token out"
            )
        if not callable(self.function):
            raise ValueError(f"the score {self.name} is {self.function!r}: give a function (tokens) -> (B, H, n)")
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # not written in Python
            return
        try:
            signature.bind(None)
        except TypeError:
            takes = ", ".join(signature.parameters)
            raise ValueError(
                f"the score {self.name} takes ({takes}): a score takes one argument (tokens), of which tokens.keys, "
                "tokens.values and tokens.positions are known"
            ) from None


def _of_entry_point(name: str, found: Any) -> Score:
    """Entry points of the group `mlx_kv.scores` are each a function or a `Score`."""
    return found if isinstance(found, Score) else Score(name, found)


OURS = (
    Score("key_diff", key_diff),
    Score("expected_attention", expected_attention, wants=AttentionInputs(moments=True)),
    Score("h2o", h2o, wants=AttentionInputs(received=True)),
    Score("key_norm", key_norm, per_token=True),
    Score("key_norm_high", key_norm_high, per_token=True),
    Score("key_value", key_value, per_token=True),
    Score("kvzip", kvzip, per_token=True, wants=AttentionInputs(reread=True)),
    Score("lag_kv", lag_kv),
    Score("random", random, per_token=True),
    Score("recent", recent, per_token=True),
    Score("snap_kv", snap_kv, wants=AttentionInputs(queries=SNAP_QUERIES)),
    Score("tova", tova, wants=AttentionInputs(queries=1)),
    Score("value_norm", value_norm, per_token=True),
)
SCORES = OpenSet("score", "a function", {score.name: score for score in OURS}, _of_entry_point)
MEASURED: dict[str, Score] = {}  # of calibrations, by name: loaded caches find them, and no list of names has them


def score_names() -> list[str]:
    """The names that `score=` takes."""
    return SCORES.names()


def register_score(name: str, function: Function, per_token: bool = False, wants: Wants | None = None) -> None:
    """Registers a score under a name, for `score=` and for loaded caches.

    Args:
        name: replaces a score of the same name.
        function: (tokens: ScoredTokens) -> (B, H, n), float32, finite; higher is kept.
        per_token: whether a token's score depends only on itself and its neighbours in the text: then it is computed
            once.
        wants: what it uses of attention; None is nothing.

    Raises:
        ValueError: a function that cannot be called with one argument, one of attention that is per_token, or a name
            that is not a string.
    """
    if not isinstance(name, str):
        raise ValueError(f"the name of a score is {name!r}: give a text")
    SCORES.registered[name] = Score(name, function, per_token, wants)


def find_score(score: str | Function | Score) -> Score:
    """The score of a name, or of a callable, which then scores all live tokens at every compaction.

    Raises:
        ValueError: no score has this name, or a function that cannot be called with one argument.
    """
    if isinstance(score, Score):
        return score
    if isinstance(score, str) and score == "fitted":
        raise ValueError(
            "the score 'fitted' is measured for each model: run mlx-kv calibrate MODEL, and use "
            "CachePolicy(calibration=mlx_kv.load_calibration(FILE))"
        )
    if callable(score):
        name = getattr(score, "__qualname__", type(score).__qualname__)
        return Score(f"{getattr(score, '__module__', '')}.{name}", score)
    if isinstance(score, str) and score in MEASURED:
        return MEASURED[score]
    return SCORES.find(score)
