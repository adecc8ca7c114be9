"""mlx-lm's own quantised cache stores the same bits at equal settings, and hands out the same."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock

from mlx_kv import KVCache, QuantizedKVCache
from mlx_kv.cache.codecs import Affine

MLX_LM_CANNOT = (5, 6)  # from the first token on: it makes planes for 6 or 5 elements in each word
WRITES = (20, 1, 3, 300, 1, 8, 2)


def tensors(new: int, dtype: mx.Dtype, seed: int) -> list[mx.array]:
    return [mx.random.normal((2, 2, new, 128), key=mx.random.key(2 * seed + i)).astype(dtype) for i in (0, 1)]


def check_same_bits(ours: KVCache, theirs: Any) -> None:
    assert ours.offset == theirs.offset
    for buffer, planes in zip(ours.view.buffers, (theirs.keys, theirs.values), strict=True):
        for own, other in zip(buffer.planes, planes, strict=True):
            assert own.dtype == other.dtype
            assert mx.array_equal(own[:, :, : ours.offset], other[:, :, : ours.offset]).item()


def feed(caches: list[Any], dtype: mx.Dtype, seeds: range) -> None:
    for seed in seeds:
        fetched = [cache.update_and_fetch(*tensors(WRITES[seed], dtype, seed)) for cache in caches]
        if hasattr(caches[0], "bits"):
            assert (caches[0].bits, caches[0].group_size) == (caches[1].bits, caches[1].group_size)
            for own, other in zip(*fetched, strict=True):
                assert all(mx.array_equal(*each).item() for each in zip(own, other, strict=True))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_the_same_bits_from_the_first_token_on_and_later(bits: int, group_size: int, dtype: mx.Dtype) -> None:
    plain = [KVCache(), stock.KVCache()]
    feed(plain, dtype, range(4))
    pairs = [[cache.to_quantized(group_size=group_size, bits=bits) for cache in plain]]
    if bits not in MLX_LM_CANNOT:
        pairs.append([QuantizedKVCache(group_size, bits), stock.QuantizedKVCache(group_size, bits)])
        feed(pairs[-1], dtype, range(4))
    for caches in pairs:
        check_same_bits(*caches)
        assert [cache.trim(5) for cache in caches] == [5, 5]
        feed(caches, dtype, range(4, len(WRITES)))
        check_same_bits(*caches)


@pytest.mark.parametrize("bits", MLX_LM_CANNOT)
def test_what_mlx_lms_own_cannot_begin_with_is_what_it_was_measured_to_be(bits: int) -> None:
    with pytest.raises(ValueError, match="broadcast"):
        feed([stock.QuantizedKVCache(64, bits)], mx.float32, range(1))
    feed([QuantizedKVCache(64, bits)], mx.float32, range(1))


def test_another_bit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = Affine.encode
    monkeypatch.setattr(Affine, "encode", lambda self, x: genuine(self, x * (1 + 1e-6)))
    with pytest.raises(AssertionError):
        test_the_same_bits_from_the_first_token_on_and_later(4, 64, mx.float32)
