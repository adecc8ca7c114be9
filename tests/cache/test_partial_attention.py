"""Attention over parts of the tokens, merged, against float64 in NumPy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from test_own_attention import TOLERANCE, normal, operand, reference, stored, wide

from mlx_kv.cache import attention, segmented
from mlx_kv.cache.attention import Dense, Operands, attend_beside, attend_partly, merged
from mlx_kv.cache.buffers import SlotBuffer
from mlx_kv.cache.codecs import PLAIN, Affine
from mlx_kv.cache.segmented import of_rows, readings_of
from mlx_kv.cache.segments import Segment


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("new", [1, 40, 160])
def test_parts_of_the_tokens_are_merged(cpu: bool, dtype: mx.Dtype, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU and as on a GPU: two parts in arrays, and one in packed planes with a causal mask."""
    monkeypatch.setattr(attention, "on_cpu", lambda: cpu)
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
    hidden = np.concatenate([np.ones((new, 60), bool), np.tri(new, 40, 40 - new, dtype=bool)], axis=1)
    wanted = reference(wide(q), *both, 0.125, hidden, wide(sinks))
    np.testing.assert_allclose(wide(got), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("new", [1, 5, 130])
def test_rows_use_as_many_tokens_of_a_segment_as_their_prompts_share(
    cpu: bool, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By partial results, and by one softmax beside tails."""
    monkeypatch.setattr(attention, "on_cpu", lambda: cpu)
    q = normal((4, 6, new, 64), mx.float32, 1)
    own = [normal((4, 2, 9, 64), mx.float32, seed) for seed in (5, 6)]
    shown, sinks = mx.random.bernoulli(0.7, (4, 1, new, 9)), normal((6,), mx.float32, 7)
    k, v = (normal((1, 2, 100, 64), mx.float32, seed) for seed in (2, 3))
    first, second = (
        Segment(
            (SlotBuffer(PLAIN[0], (k[:, :, a:b],), 64, k.dtype), SlotBuffer(PLAIN[1], (v[:, :, a:b],), 64, v.dtype))
        )
        for a, b in ((0, 60), (60, 100))
    )
    chains = [((first, 60), (second, 40)), ((first, 37),), ((first, 60), (second, 4)), ((first, 60), (second, 40))]
    counts = [100, 37, 64, 100]
    readings = readings_of(chains, counts)
    got = merged([of_rows(reading.rows, reading.attend(q, 0.125), (0, 1, 2, 3)) for reading in readings])
    for row, count in enumerate(counts):
        keys, values = (wide(x[:, :, :count]) for x in (k, v))
        wanted = reference(wide(q[row : row + 1]), keys, values, 0.125, None, None)
        np.testing.assert_allclose(wide(got[row : row + 1]), wanted, atol=2e-5, rtol=2e-5)
    tails = Operands(Dense(own[0]), Dense(own[1]), shown)
    got = attend_beside([reading.operands(4, new) for reading in readings], tails, q, 0.125, sinks)
    for row, count in enumerate(counts):
        keys, values = (
            np.concatenate([wide(x[:, :, :count]), wide(y[row : row + 1])], axis=2)
            for x, y in zip((k, v), own, strict=True)
        )
        seen = np.concatenate([np.ones((new, count), bool), np.array(shown)[row, 0]], axis=1)
        wanted = reference(wide(q[row : row + 1]), keys, values, 0.125, seen, wide(sinks))
        np.testing.assert_allclose(wide(got[row : row + 1]), wanted, atol=2e-5, rtol=2e-5)


def test_a_gpu_attends_at_once_where_scores_are_few_and_half_of_them_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmented, "on_cpu", lambda: False)
    heads = 4
    keys = SlotBuffer(PLAIN[0], (mx.zeros((1, heads, 1000, 8)),), 8, mx.float32)
    (all_read,) = readings_of([((Segment((keys, keys)), 1000),)] * 4, [1000] * 4)
    assert segmented._few_scores((4, heads, 1, 8), [all_read], 500)
    most = segmented.BLOCK_SCORES[mx.DeviceType.gpu] // (4 * heads)
    assert not segmented._few_scores((4, heads, 1, 8), [all_read], most)  # with those of their own
    assert not segmented._few_scores((4, heads, most // 1000, 8), [all_read], 500)
    chains = [((Segment((keys, keys)), 1000),) for _ in range(3)]
    apart = readings_of([chain for chain in chains for _ in range(2)], [1000] * 6)
    assert len(apart) == 3  # each row reads a third of what all would
    assert not segmented._few_scores((6, heads, 1, 8), apart, 500)
    monkeypatch.undo()
    assert not segmented._few_scores((4, heads, 1, 8), [all_read], 500)  # a CPU never does
