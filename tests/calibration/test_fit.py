"""Ridge regressions and budgets of heads, against slow and obvious ones."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv.cache.eviction.calibration import FittedLayer, features
from mlx_kv.calibration.fit import (
    KEPT,
    LAMBDA,
    RECENT,
    SINKS,
    Moments,
    head_parts,
    head_table,
    inputs,
    quality,
    targets,
)
from mlx_kv.mlxlm.probe import measured_rotation

LAYER = FittedLayer(mx.zeros((0,)), mx.zeros((0,)))


def data(n: int = 300, size: int = 7, heads: int = 2) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    f = random.normal(size=(n, size)) * np.arange(1, size + 1) + 100 * np.arange(size)
    return f, f @ random.normal(size=(size, heads)) + random.normal(size=(n, heads))


def slow_ridge(f: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By least squares over rows of the penalty, below the data."""
    mean, std = f.mean(axis=0), f.std(axis=0)
    z = (f - mean) / std
    rows = np.sqrt(LAMBDA * len(f)) * np.eye(f.shape[1])
    zeros = np.zeros((f.shape[1], y.shape[1]))
    w, *_ = np.linalg.lstsq(np.concatenate([z, rows]), np.concatenate([y - y.mean(axis=0), zeros]), rcond=None)
    w = w / std[:, None]
    return w, y.mean(axis=0) - mean @ w


@pytest.mark.parametrize("cuts", [[], [100], [1, 2, 250]])
def test_ridge_of_moments_is_that_of_the_data(cuts: list[int]) -> None:
    f, y = data()
    moments = Moments()
    for own, targets_ in zip(np.split(f, cuts), np.split(y, cuts), strict=True):
        moments.add(own, targets_)
    for got, wanted in zip(moments.ridge(), slow_ridge(f, y), strict=True):
        assert np.allclose(got, wanted, rtol=1e-8, atol=1e-9)


def test_a_constant_feature_has_no_weight() -> None:
    f, y = data()
    f = np.concatenate([f, np.full((len(f), 1), 3.7)], axis=1)
    moments = Moments()
    moments.add(f, y)
    weights, bias = moments.ridge()
    assert (weights[-1] == 0).all()
    assert np.allclose(f @ weights + bias, f[:, :-1] @ slow_ridge(f[:, :-1], y)[0] + slow_ridge(f[:, :-1], y)[1])


def test_a_planted_linear_target_is_recovered() -> None:
    """From keys of a RoPE and values, as the score will compute it."""
    rope = measured_rotation_of(16)
    key = mx.random.key(0)
    keys, values = (mx.random.normal((1, 2, 600, 16), key=k) for k in mx.random.split(key))
    layer = LAYER._replace(key_rope=rope)
    f = inputs(layer, keys, values)
    planted = np.random.default_rng(2).normal(size=(f.shape[1], 2)) / 20
    planted[-1] = 0.3  # of the position
    moments = Moments()
    moments.add(f, f @ planted - 4)
    weights, bias = (mx.array(x.astype(np.float32)) for x in moments.ridge())
    fitted = layer._replace(weights=weights, bias=bias)
    said = np.array(fitted.predicted(keys, values, mx.arange(600)[None, None])[0]).T
    assert quality([said], [f @ planted - 4]).r2 > 0.999


def measured_rotation_of(dim: int):  # type: ignore[no-untyped-def]
    import mlx.nn as nn

    return measured_rotation(nn.RoPE(dim), dim)


def test_inputs_are_the_features_of_the_score() -> None:
    layer = LAYER._replace(key_rope=measured_rotation_of(8))
    keys, values = mx.random.normal((1, 2, 9, 8)), mx.random.normal((1, 2, 9, 8))
    wanted = features(layer, keys, values, mx.arange(9)[None, None])
    assert np.array_equal(inputs(layer, keys, values), np.array(wanted[0], dtype=np.float64))


def test_quality_of_a_perfect_and_of_a_reversed_prediction() -> None:
    y = np.random.default_rng(3).normal(size=(40, 2))
    assert quality([y], [y]) == pytest.approx((1.0, 1.0, 1.0))
    assert quality([-y], [y]).spearman == pytest.approx(-1.0)
    assert quality([-y], [y]).top_quarter == 0


def test_parts_of_heads_count_one_ranking_of_all() -> None:
    random = np.random.default_rng(4)
    n = 600
    shares = [random.random((2, n)) * scale for scale in (1.0, 0.5, 2.0)]
    every = [
        (own[h, i], layer, h) for layer, own in enumerate(shares) for h in range(2) for i in range(SINKS, n - RECENT)
    ]
    kept = sorted(every, reverse=True)[: (round(KEPT * n) - SINKS - RECENT) * 6]
    wanted = [[sum((layer, h) == (i, j) for _, layer, h in kept) / len(kept) for j in range(2)] for i in range(3)]
    assert np.allclose(np.array(head_parts(shares)), wanted)
    assert np.sum(head_parts(shares)) == pytest.approx(1)


@pytest.mark.parametrize("n", [2, 64, 100, 271, 272, 543, 544, 545])
def test_short_texts_have_parts_too(n: int) -> None:
    shares = [np.random.default_rng(n).random((2, n)) for _ in range(3)]
    assert np.sum(head_parts(shares)) == pytest.approx(1)


def test_layers_of_different_heads_have_one_budget_each() -> None:
    parts = [[np.array([0.1, 0.3]), np.array([0.6])]]
    assert np.allclose(head_table(parts), [[0.2], [0.6]])


def test_targets_are_logarithms_by_token() -> None:
    shares = np.array([[0.5, 0.0]], np.float32)
    assert np.allclose(targets(shares), [[np.log(0.5 + 1e-5)], [np.log(1e-5)]])
