"""The fitted score of tokens whose keys and values were rotated by a known RoPE, against a formula for one token."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kv.cache.eviction import calibration as fitted
from mlx_kv.cache.eviction.calibration import Calibration, FittedLayer, Rotation, features, fitted_score
from mlx_kv.cache.eviction.scores import ScoredTokens

HEADS, DIM, VALUE_DIM = 2, 12, 8


def rotation(dim: int, rotated: int, interleaved: bool, factor: float) -> Rotation:
    """The channels that mlx's RoPE rotates together: neighbours, or those that are half apart."""
    half = mx.arange(rotated // 2)
    pairs = (2 * half, 2 * half + 1) if interleaved else (half, half + rotated // 2)
    frequencies = 10000.0 ** (-2 * half.astype(mx.float32) / rotated)
    return Rotation(mx.stack(pairs, axis=1).astype(mx.int32), frequencies, mx.array(factor))


@given(
    st.integers(1, 3),
    st.lists(st.integers(0, 5000), min_size=1, max_size=7, unique=True),
    st.sampled_from([4, 6, 8]),
    st.booleans(),
    st.sampled_from([1.0, 1.3]),
    st.booleans(),
    st.integers(1, 9),
    st.integers(0, 99),
)
def test_a_token_is_worth_what_its_keys_before_rope_say(
    rows: int, places: list[int], rotated: int, interleaved: bool, factor: float, of_values: bool, block: int, seed: int
) -> None:
    """Whatever its position, whichever tokens are scored beside it, and however many at once."""
    rng, n = np.random.default_rng(seed), len(places)
    keys, values = (rng.normal(size=(rows, HEADS, n, dim)).astype(np.float32) for dim in (DIM, VALUE_DIM))
    key_rope = rotation(DIM, rotated, interleaved, factor)
    value_rope = rotation(VALUE_DIM, 4, not interleaved, factor) if of_values else None
    count = HEADS * (DIM + VALUE_DIM + 2) + 1
    weights, bias = rng.normal(size=(count, HEADS)).astype(np.float32) * 0.1, np.array([-1.0, -2.0], np.float32)
    layers = [FittedLayer(mx.array(weights) * layer, mx.array(bias), key_rope, value_rope) for layer in (0, 1)]
    positions = np.stack([rng.permutation(places) for _ in range(rows)]).astype(np.int32)

    def stored(x: np.ndarray, rope: Rotation | None, rotated: int, interleaved: bool) -> mx.array:
        if rope is None:
            return mx.array(x)
        lines = []
        for row in range(rows):
            each = [
                mx.fast.rope(
                    mx.array(x[row : row + 1, :, i : i + 1]) * mx.where(mx.arange(x.shape[3]) < rotated, factor, 1.0),
                    rotated,
                    traditional=interleaved,
                    base=10000.0,
                    scale=1.0,
                    offset=int(positions[row, i]),
                )
                for i in range(n)
            ]
            lines.append(mx.concatenate(each, axis=2))
        return mx.concatenate(lines)

    held = stored(keys, key_rope, rotated, interleaved), stored(values, value_rope, 4, not interleaved)
    tokens = ScoredTokens(keys=held[0], values=held[1], positions=mx.array(positions)[:, None], layer=1)
    wanted = np.zeros((rows, HEADS, n))
    for row in range(rows):
        for i in range(n):
            norms = [np.log(np.linalg.norm(np.array(x)[row, :, i], axis=-1) + 1e-6) for x in held]
            line = [keys[row, :, i].reshape(-1), values[row, :, i].reshape(-1), *norms, [np.log1p(positions[row, i])]]
            wanted[row, :, i] = np.exp(np.minimum(np.concatenate(line) @ weights + bias, 10))
    before, fitted.BLOCK = fitted.BLOCK, block
    try:
        found = fitted_score(layers)(tokens)
    finally:
        fitted.BLOCK = before
    assert found.dtype == mx.float32
    np.testing.assert_allclose(np.array(found), wanted, rtol=5e-3)
    assert features(layers[1], *held, tokens.positions).shape == (rows, n, count)


def test_weights_and_ropes_come_back_from_arrays() -> None:
    layer = FittedLayer(mx.ones((45, 2)), mx.zeros((2,)), None, rotation(VALUE_DIM, 4, True, 1.5))
    again = FittedLayer.of_arrays(dict(layer.arrays))
    assert again.key_rope is None
    assert again.arrays.keys() == layer.arrays.keys()
    assert all(mx.array_equal(again.arrays[name], layer.arrays[name]) for name in layer.arrays)


def test_calibrations_are_told_apart_by_their_numbers() -> None:
    def made(scale: float = 1.0, **changes: Any) -> Calibration:
        layer = FittedLayer(mx.ones((45, 2)) * scale, mx.zeros((2,)))
        settings: dict[str, Any] = {"fingerprint": "one", "heads": [[1, 3], [2, 2]], "layers": (layer, layer)}
        return Calibration(**settings | changes)

    assert made() == made()
    assert hash(made()) == hash(made())
    others = [made(1.5), made(fingerprint="two"), made(heads=[[3, 1], [2, 2]]), made(layers=())]
    assert len({made(), *others}) == 5
    with pytest.raises(ValueError, match="no weights for score='fitted'"):
        _ = others[-1].score
    with pytest.raises(ValueError, match="got budgets for 1 layers and weights for 2"):
        made(heads=[[1, 3]])
