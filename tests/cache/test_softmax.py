"""The exponential functions of our attention on a CPU, and the largest of many scores."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv.cache import attention


def furthest(x: np.ndarray) -> float:
    """The largest relative error of the exponential of x."""
    exact = np.exp(x.astype(np.float64))
    return float(np.max(np.abs(np.array(attention.exponential(mx.array(x))).astype(np.float64) / exact - 1)))


def test_the_exponential_is_as_exact_as_it_says() -> None:
    assert furthest(np.linspace(-87, 0, 1_000_003, dtype=np.float32)) < 3e-7
    assert furthest(-np.geomspace(1e-30, 87, 100_003, dtype=np.float32)) < 3e-7
    assert attention.exponential(mx.array([0.0, -0.0])).tolist() == [1.0, 1.0]
    below = np.concatenate([[-87.5, -88, -1e4, -3e38, np.finfo(np.float32).min], -np.geomspace(87.4, 3e38, 1000)])
    assert not np.array(attention.exponential(mx.array(below.astype(np.float32)))).any()


@pytest.mark.parametrize(
    ("name", "which", "off"),
    [
        *(("SERIES", *each) for each in enumerate((4, 0.3, 0.03, 3e-3, 3e-4, 1e-4))),
        ("LN_2", 0, 1e-6),
        ("LN_2", 1, 1e-3),
    ],
)
def test_a_constant_of_the_exponential_that_is_off_is_caught(
    name: str, which: int, off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = list(getattr(attention, name))
    constants[which] *= 1 + off
    monkeypatch.setattr(attention, name, tuple(constants))
    mx.disable_compile()
    try:
        assert furthest(np.linspace(-87, 0, 100_003, dtype=np.float32)) > 3e-7
    finally:
        mx.enable_compile()


def power_error(x: np.ndarray) -> float:
    """The largest absolute error of the power of a score x below the largest, relative to what its rounding allows."""
    got = np.array(attention.softmax_powers(mx.array(x), mx.array([0.0]))).astype(np.float64)
    exact = np.exp(x.astype(np.float64))
    return float(np.max(np.abs(got - exact) / (exact * (1e-7 + 6e-8 * np.abs(x)) + 1e-38)))


LINE = np.linspace(-87, 0, 1_000_003, dtype=np.float32)


def test_powers_of_a_softmax_are_as_exact_as_they_say() -> None:
    assert power_error(LINE) < 1.5
    got = np.array(attention.softmax_powers(mx.array(LINE + np.float32(40)), mx.array([40.0])))
    assert np.max(np.abs(got - np.exp(np.float32(LINE + np.float32(40)) - 40.0))) < 3e-7
    assert attention.softmax_powers(mx.array([0.0, -3.0]), mx.array([0.0, -3.0])).tolist() == [1.0, 1.0]
    below = np.concatenate([[-88, -1e4, -3e38, np.finfo(np.float32).min], -np.geomspace(87.7, 3e38, 1000)])
    assert not np.array(attention.softmax_powers(mx.array(below.astype(np.float32)), mx.array([0.0]))).any()


@pytest.mark.parametrize(("which", "off"), list(enumerate((0.3, 0.03, 3e-3, 3e-4, 3e-5, 1e-5, 1e-6))))
def test_a_coefficient_that_is_off_is_caught(which: int, off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = list(attention.SERIES_OF_2)
    constants[which] *= 1 + off
    monkeypatch.setattr(attention, "SERIES_OF_2", tuple(constants))
    mx.disable_compile()
    try:
        assert power_error(LINE[::10]) > 1.5
    finally:
        mx.enable_compile()


@pytest.mark.parametrize("slots", [1, 15, 255, 256, 257, 271, 512, 1000])
def test_the_largest_score_in_stripes(slots: int) -> None:
    scores = mx.random.normal((2, 3, 2, 5, slots))
    assert mx.array_equal(attention._largest(scores), scores.max(axis=-1, keepdims=True))
    for place in range(0, slots, max(1, slots // 50)):
        one = mx.zeros((1, 2, slots)).at[:, 1, place].add(7)
        assert attention._largest(one).flatten().tolist() == [0, 7]
