"""Attention over parts of the tokens, merged, against float64 in NumPy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from test_own_attention import TOLERANCE, normal, operand, reference, stored, wide

from mlx_kv.cache.attention import Dense, attend_partly, blocks, merged
from mlx_kv.cache.codecs import Affine


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("new", [1, 40])
def test_parts_of_the_tokens_are_merged(cpu: bool, dtype: mx.Dtype, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU and as on a GPU: two parts in arrays, and one in packed planes with a causal mask."""
    monkeypatch.setattr(blocks, "on_cpu", lambda: cpu)
    q = normal((2, 6, new, 64), dtype, 1)
    k, v = (normal((2, 2, 100, 64), dtype, seed) for seed in (2, 3))
    (keys, wide_keys), (values, wide_values) = (stored(Affine(8, 64), x[:, :, 60:]) for x in (k, v))
    operands_of = [
        (Dense(k[:, :, :31]), Dense(v[:, :, :31]), None),
        (Dense(k[:, :, 31:60]), Dense(v[:, :, 31:60]), None),
        (operand(Affine(8, 64), keys), operand(Affine(8, 64), values), "causal"),
    ]
    sinks = normal((6,), dtype, 4)
    got = merged([attend_partly(q, a, b, 0.125, mask) for a, b, mask in operands_of], sinks)
    both = (np.concatenate([wide(x[:, :, :60]), y], axis=2) for x, y in ((k, wide_keys), (v, wide_values)))
    hidden = np.tri(new, 100, 100 - new, dtype=bool)
    wanted = reference(wide(q), *both, 0.125, hidden, wide(sinks))
    np.testing.assert_allclose(wide(got), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
