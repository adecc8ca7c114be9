"""Quantised caches as on CUDA, whose products take no slices: whole buffers are read, and models say the same."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from engines import as_on_a_gpu
from family_model import distance, read, tokens
from tiny_models import make_model

from mlx_kv import CachePolicy, KVCache, make_prompt_cache
from mlx_kv.cache.growth import SLOT_MULTIPLE
from mlx_kv.mlxlm.attention import AttentionPatch
from mlx_kv.mlxlm.cuda import CudaAttention, use_cuda_attention

POLICIES = {
    "8 bits": CachePolicy(bits=8, group_size=32),
    "4 bits": CachePolicy(bits=4, group_size=32),
    "3 bits": CachePolicy(bits=3, group_size=32),
    "two sizes": CachePolicy(bits=(8, 4), group_size=32),
    "rotated": CachePolicy(bits=4, group_size=32, codec="rotated"),
    "a residual": CachePolicy(bits=4, group_size=32, residual_length=8),
    "a window": CachePolicy(bits=8, group_size=32, max_kv_size=32),
    "a budget": CachePolicy(bits=8, group_size=32, budget=32),
}
CHUNKS = (20, 11, 1, 1, 3, 1)


class Products:
    """`mx.quantized_matmul`, as on CUDA once that is chosen, and the slots of each of its products."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.genuine, self.cuda = mx.quantized_matmul, False

    def __call__(self, x: mx.array, words: mx.array, *others: Any, **named: Any) -> mx.array:
        if words.ndim > 2:
            assert not self.cuda or np.array(words, copy=False).flags.c_contiguous, "slices have no kernel"
            self.slots.append(words.shape[2])
        return self.genuine(x, words, *others, **named)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Any:
    counted = Products()
    monkeypatch.setattr(mx.cuda, "is_available", lambda: counted.cuda)
    monkeypatch.setattr(mx, "quantized_matmul", counted)
    with as_on_a_gpu():
        yield counted


def caches_of(model: nn.Module, policy: CachePolicy, lengths: tuple[int, ...]) -> list[KVCache]:
    each = [make_prompt_cache(model, policy) for _ in lengths]
    caches = [same[0].merge(same) for same in zip(*each, strict=True)]
    for cache in caches:
        cache.prepare(lengths=list(lengths))
    return caches


def said(model: nn.Module, policy: CachePolicy, poison: float = 0.0) -> list[mx.array]:
    """Logits of a prompt in chunks, and of steps of a ragged batch, whose dead slots are spoiled before them."""
    alone = read(model, make_prompt_cache(model, policy), tokens(), CHUNKS)
    lengths = (9, 20, 3)
    caches, prompt = caches_of(model, policy, lengths), mx.concatenate([tokens(seed, 20) for seed in range(3)])
    read(model, caches, prompt, (12, 8))
    for cache in caches:
        cache.finalize()
        if poison:
            spoil(cache, poison)
    return [alone, read(model, caches, prompt, (1, 1))]


def spoil(cache: KVCache, value: float) -> None:
    """Writes numbers into scales and biases of the slots that no row uses. Rows have slots from 0 on."""
    for buffer in cache.buffers or ():
        used = mx.array([row.end for row in cache.rows])[:, None, None, None]
        dead = mx.arange(buffer.capacity)[:, None] >= used
        buffer.planes = tuple(
            plane if plane.dtype == mx.uint32 else mx.where(dead, mx.array(value, plane.dtype), plane)
            for plane in buffer.planes
        )


@pytest.mark.parametrize("name", POLICIES)
def test_whole_buffers_say_what_copies_say(name: str, products: Products) -> None:
    """Of one layer: in several, a last bit of one would turn the rounding of a key in the next."""
    model, policy = make_model("qwen3", num_hidden_layers=1), POLICIES[name]
    wanted = said(model, policy)
    products.slots, products.cuda = [], True
    with AttentionPatch(model, backend=CudaAttention()):
        got = said(model, policy, poison=1e3)
    assert all(distance(*each) < 1e-5 for each in zip(got, wanted, strict=True))
    assert set(products.slots) == {SLOT_MULTIPLE}, "one shape of products"


def test_weights_of_slots_that_no_row_uses_are_caught(products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(x: mx.array, widths: Any) -> mx.array:
        return mx.concatenate([x, mx.ones((*x.shape[:-1], widths[-1][1]))], axis=-1)

    monkeypatch.setattr(mx, "pad", ones)
    with pytest.raises(AssertionError):
        test_whole_buffers_say_what_copies_say("8 bits", products)


def test_planes_of_many_reserved_slots_are_copied(products: Products) -> None:
    model, policy, wanted = make_model("qwen3"), POLICIES["8 bits"], []
    products.cuda = True
    with AttentionPatch(model, backend=CudaAttention()):
        for reserve in (0, 4_000):
            caches = make_prompt_cache(model, policy)
            for cache in caches:
                cache.reserve(reserve)
            wanted.append(read(model, caches, tokens(), CHUNKS))
            assert max(products.slots) == (sum(CHUNKS) if reserve else SLOT_MULTIPLE)
            products.slots = []
    assert distance(*wanted) < 1e-5


def test_it_is_used_on_cuda_as_long_as_the_model_lives(products: Products) -> None:
    family = importlib.import_module("mlx_lm.models.qwen3")
    for products.cuda in (False, True):
        model, before = make_model("qwen3"), family.scaled_dot_product_attention
        use_cuda_attention(model)
        assert (family.scaled_dot_product_attention is not before) == products.cuda
        del model
        gc.collect()
        assert family.scaled_dot_product_attention is before
