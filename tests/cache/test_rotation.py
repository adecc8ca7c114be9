"""The rotation of the codecs is the matrix that it is said to be, in every head dim that has room for it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from rotations import matrix

from mlx_kv import KVCache
from mlx_kv.cache import codecs
from mlx_kv.cache.codecs import Affine, check_rotation, rotated

DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 208, 256, 512, 576, 768, 1024)


def of_unit_vectors(dim: int) -> np.ndarray:
    """What becomes of each channel alone."""
    return np.array(rotated(mx.eye(dim)))


@pytest.mark.parametrize("dim", DIMS)
def test_it_is_the_matrix(dim: int) -> None:
    check_rotation("keys", dim)
    np.testing.assert_allclose(of_unit_vectors(dim), matrix(dim), atol=1e-6)


@pytest.mark.parametrize("dim", DIMS)
def test_it_is_orthogonal_and_its_own_inverse(dim: int) -> None:
    own = of_unit_vectors(dim).astype(np.float64)
    np.testing.assert_allclose(own @ own.T, np.eye(dim), atol=2e-6)
    np.testing.assert_allclose(own, own.T, atol=1e-6)
    for dtype, tolerance in ((mx.float32, 1e-5), (mx.float16, 1e-2), (mx.bfloat16, 6e-2)):
        x = mx.random.normal((2, 3, 5, dim)).astype(dtype)
        again = rotated(rotated(x))
        assert again.dtype == dtype
        assert mx.allclose(again, x, atol=tolerance, rtol=tolerance).item()


@pytest.mark.parametrize("dim", DIMS)
def test_products_stay_what_they_are_and_a_large_channel_is_spread(dim: int) -> None:
    q, k = mx.random.normal((2, 2, 7, dim)), mx.random.normal((2, 2, 9, dim))
    products, turned = q @ k.swapaxes(2, 3), rotated(q) @ rotated(k).swapaxes(2, 3)
    assert mx.allclose(products, turned, atol=2e-4, rtol=1e-4).item()
    blocks = dim // codecs.power_of_two_in(dim)
    if blocks not in (1, 2):  # of one block each channel is spread evenly; of more, most of it stays in its own
        assert np.abs(of_unit_vectors(dim)).max() < 1 / np.sqrt(codecs.MIN_MIXED) + 1e-6
    else:
        np.testing.assert_allclose(np.abs(of_unit_vectors(dim)).max(axis=1), np.sqrt(blocks / dim), rtol=1e-5)


def test_another_matrix_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "MAX_MIXED", 32)
    with pytest.raises(AssertionError):
        test_it_is_the_matrix(64)
    monkeypatch.setattr(codecs, "MAX_MIXED", 512)
    with pytest.raises(AssertionError):
        test_it_is_the_matrix(512)


@pytest.mark.parametrize("dim", [1, 2, 8, 24, 36, 40, 72, 100])
def test_other_sizes_are_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=f"keys have head dim {dim}, which 16 does not divide"):
        check_rotation("keys", dim)


def test_a_cache_refuses_what_it_cannot_rotate_before_anything_changed() -> None:
    class Narrow(Affine):
        """Groups that a head dim of 8 is a multiple of, if there were any."""

        def check(self, name: str, x: mx.array) -> None:
            check_rotation(name, x.shape[-1])

    cache = KVCache(codec=("plain", Narrow(8, 32, rotate=True)))
    with pytest.raises(ValueError, match="values have head dim 40, which 16 does not divide, so they cannot be rot"):
        cache.update_and_fetch(mx.ones((1, 2, 1, 64)), mx.ones((1, 2, 1, 40)))
    assert cache.empty()
