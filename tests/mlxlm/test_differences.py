"""What docs/coming-from-mlx-lm.md says is different on purpose: each line is tried on both sides, or where it says.

A line has a check here under the words of its first cell; `ELSEWHERE` names the test of what takes whole families.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock
from tiny_models import make_model

from mlx_kv import (
    BatchKVCache,
    CachePolicy,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RingKVCache,
    RotatingKVCache,
    trim_prompt_cache,
)
from mlx_kv import make_prompt_cache as ours_of
from mlx_kv.mlxlm.traverse import attention_caches

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "coming-from-mlx-lm.md").read_text()
SECTIONS = "".join(
    PAGE.partition(f"## {name}")[2].partition("\n## ")[0]
    for name in ("Differences that a program can observe", "Behaviour of caches")
)
LINES = re.findall(r"^\| (?!\||---)(.+?) \| ", SECTIONS, re.M)
ELSEWHERE = {
    "model whose window is wider than its cache (plamo3)": (
        "tests/mlxlm/test_quirks.py",
        "test_a_model_gets_the_window_that_it_asks_for",
    ),
    "prompts of different lengths where recurrent layers read padding (mamba, jamba, rwkv7, ...)": (
        "tests/mlxlm/test_quirks.py",
        "test_prompts_of_any_lengths_get_what_they_get_alone",
    ),
    "rows of different lengths where attention counts slots (afm7, minimax_m3_vl)": (
        "tests/mlxlm/test_quirks.py",
        "test_prompts_of_any_lengths_get_what_they_get_alone",
    ),
    "rows of very different lengths": (
        "tests/cache/test_class_rule.py",
        "test_one_long_row_among_fifteen_short_ones",
    ),
}
CHECKS: dict[str, Callable[[], None]] = {}


def line(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers the check of a line."""

    def registered(check: Callable[[], None]) -> Callable[[], None]:
        CHECKS[name] = check
        return check

    return registered


def test_every_line_has_its_check_and_every_check_its_line() -> None:
    assert len(LINES) > 30
    assert sorted(LINES) == sorted([*CHECKS, *ELSEWHERE])
    for path, test in ELSEWHERE.values():
        assert f"\ndef {test}(" in (ROOT / path).read_text()


@pytest.mark.parametrize("name", [name for name in LINES if name not in ELSEWHERE])
def test_it_is_as_the_line_says(name: str) -> None:
    CHECKS[name]()


def filled(cache: Any, *writes: int, rows: int = 1, dim: int = 64) -> Any:
    for new in writes:
        cache.update_and_fetch(mx.zeros((rows, 2, new, dim)), mx.zeros((rows, 2, new, dim)))
    return cache


def read(family: str, caches: Callable[[Any], list[Any]]) -> mx.array:
    model = make_model(family)
    logits = model(mx.arange(12)[None], cache=caches(model))
    mx.eval(logits)
    return logits


def quantised_by_mlx_lm(model: Any) -> list[Any]:
    return [cache.to_quantized(32, 8) for cache in stock.make_prompt_cache(model)]


def quantised(model: Any) -> list[Any]:
    return ours_of(model, CachePolicy(bits=8, group_size=32))


@line("growth")
def check_growth() -> None:
    theirs = stock.KVCache()
    sizes = [filled(theirs, 256).keys.shape[2] for _ in range(8)]
    assert sizes == [256 * n for n in range(1, 9)]
    grown, reserved = filled(KVCache(), *[256] * 8), filled(KVCache(reserve=2048), *[256] * 8)
    assert grown.growths < 7
    assert reserved.growths == 0
    assert grown.view.growth.capacity(10**6 + 1, 10**6 // 256 * 256) - 10**6 <= 8192


@line("quantised prefill")
def check_quantised_prefill() -> None:
    new = mx.zeros((1, 2, 20, 64))
    assert isinstance(stock.QuantizedKVCache().update_and_fetch(new, new)[0], tuple)
    assert isinstance(QuantizedKVCache().update_and_fetch(new, new)[0], mx.array)


@line("quantised with attention sinks (gpt-oss)")
def check_sinks() -> None:
    def theirs(model: Any) -> list[Any]:
        return [stock.QuantizedKVCache(32, 8) for _ in stock.make_prompt_cache(model)]

    with pytest.raises(ValueError, match="does not support attention sinks"):
        read("gpt_oss", theirs)
    assert mx.isfinite(read("gpt_oss", quantised)).all()


@line("quantised MLA (DeepSeek), gemma2")
def check_latent_attention() -> None:
    for family in ("deepseek_v3", "gemma2"):
        with pytest.raises((TypeError, AttributeError, ValueError)):
            read(family, quantised_by_mlx_lm)
        assert mx.isfinite(read(family, quantised)).all()


@line("quantised inside `CacheList`")
def check_inside_lists() -> None:
    model = make_model("deepseek_v32")
    lists = stock.make_prompt_cache(model)
    assert all(type(cache) is stock.CacheList for cache in lists)
    assert not any(hasattr(cache, "to_quantized") for cache in lists)
    kinds = [isinstance(cache, QuantizedKVCache) for cache in attention_caches(quantised(model))]
    assert kinds == [True, False] * (len(kinds) // 2)  # the second of a layer is its indexer's


@line("empty quantised cache")
def check_empty() -> None:
    with pytest.raises(AttributeError):
        _ = stock.QuantizedKVCache().nbytes
    empty = QuantizedKVCache()
    assert empty.nbytes == 0
    assert isinstance(KVCache.from_state(empty.state), QuantizedKVCache)


@line("`trim(n)` by more tokens than the cache holds")
def check_trim() -> None:
    ours, theirs = filled(KVCache(), 5), filled(stock.KVCache(), 5)
    assert theirs.trim(9) == 5
    with pytest.raises(ValueError, match="this cache holds 5"):
        ours.trim(9)
    assert ours.offset == 5


@line("rotating caches, prefill")
def check_rotating_prefill() -> None:
    ours, theirs = filled(RingKVCache(16, max_write=64), 64, 64, 64), stock.RotatingKVCache(16)
    assert [filled(theirs, 64).keys.shape[2] for _ in range(3)] == [64, 79, 79]
    assert (ours.layout.max_slots, ours.growths) == (79, 0)
    assert filled(ours, *[1] * 300).layout.max_slots == 16


@line("rotating caches, quantised")
def check_rotating_quantised() -> None:
    with pytest.raises(NotImplementedError):
        stock.RotatingKVCache(16).to_quantized()
    ring = filled(RotatingKVCache(16), 40).to_quantized(bits=8)
    assert isinstance(ring, QuantizedKVCache)
    assert filled(ring, 1).offset == 41


@line("rotating caches, `trim` once wrapped")
def check_rotating_trim() -> None:
    assert stock.trim_prompt_cache([filled(stock.RotatingKVCache(16), 40, 4)], 4) == 0
    ring = filled(RingKVCache(16, max_write=4), 40, 4)
    assert ring.trim(4) == 4
    with pytest.raises(ValueError, match="max_rollback=5"):
        filled(RingKVCache(16, max_write=4), 40, 4).trim(5)


@line("`max_kv_size` in a model with its own cache list")
def check_max_kv_size() -> None:
    model = make_model("gemma3_text")
    assert any(type(cache) is stock.KVCache for cache in stock.make_prompt_cache(model, max_kv_size=8))
    caches = attention_caches(ours_of(model, CachePolicy(max_kv_size=8)))
    assert all(isinstance(cache, RotatingKVCache) for cache in caches)
    with pytest.raises(ValueError, match=r"no layer of this model can honour max_kv_size: .* may be moved or dropped"):
        ours_of(make_model("deepseek_v32"), CachePolicy(max_kv_size=8))


@line("trim of a batch")
def check_rows() -> None:
    assert not hasattr(stock.BatchKVCache([0, 0]), "trim_per_sequence")
    batch = KVCache.merge([filled(KVCache(), 9), filled(KVCache(), 9)])
    batch.trim_per_sequence([0, 4])
    assert batch.offset.tolist() == [9, 5]


@line("batches of rotating caches")
def check_rotating_batches() -> None:
    theirs = stock.RotatingKVCache.merge([filled(stock.RotatingKVCache(16, keep=4), 40) for _ in range(2)])
    ours = RotatingKVCache.merge([filled(RotatingKVCache(16, keep=4), 40) for _ in range(2)])
    assert (theirs.extract(0).keep, ours.extract(0).keep) == (0, 4)


@line("batches of quantised or chunked caches")
def check_batches() -> None:
    for theirs, ours in (
        (stock.QuantizedKVCache(), QuantizedKVCache),
        (stock.ChunkedKVCache(16), lambda: ChunkedKVCache(16)),
    ):
        assert not hasattr(theirs, "merge")
        assert filled(KVCache.merge([filled(ours(), 9), filled(ours(), 5)]), 1, rows=2).offset.tolist() == [10, 6]


@line("left padding, right padding")
def check_padding() -> None:
    theirs, ours = (filled(kind([3, 0]), 5, rows=2) for kind in (stock.BatchKVCache, BatchKVCache))
    assert theirs._idx == 5
    assert [row.end for row in ours.view.rows] == [2, 5]
    ours.prepare(lengths=[1, 4], right_padding=[3, 0])
    filled(ours, 4, rows=2).finalize()
    assert [row.end for row in ours.view.rows] == [3, 9]


@line("wrong shapes or dtypes")
def check_shapes() -> None:
    ours, theirs = filled(KVCache(), 5), filled(stock.KVCache(), 5)
    half = mx.zeros((1, 2, 1, 64), mx.float16)
    assert theirs.update_and_fetch(half, half)[0].dtype == mx.float32
    with pytest.raises(ValueError, match="float16"):
        ours.update_and_fetch(half, half)
    with pytest.raises(ValueError, match=r"keys .*\b32\b"):
        filled(ours, 1, dim=32)
    assert ours.offset == 5


@line("`keys`, `values` of a quantised cache")
def check_planes() -> None:
    assert isinstance(filled(stock.QuantizedKVCache(), 5).keys, tuple)
    planes = filled(QuantizedKVCache(), 5)
    assert planes.keys.dtype == planes.values.dtype == mx.uint32


# --- what differs, and why --------------------------------------------------------------------------------------------


@line("`isinstance(cache, RotatingKVCache)`")
def check_classes() -> None:
    cache = CachePolicy(max_kv_size=8).make_cache()
    assert isinstance(cache, RotatingKVCache)
    assert isinstance(cache, KVCache)
    assert not isinstance(stock.RotatingKVCache(8), stock.KVCache)
    assert not isinstance(stock.BatchKVCache([0]), stock.KVCache)
    assert type(RotatingKVCache(8)) is KVCache


@line("`bits`, `group_size`")
def check_bits() -> None:
    new = mx.zeros((1, 2, 20, 64))
    ours, theirs = QuantizedKVCache(), stock.QuantizedKVCache()
    assert (ours.bits, ours.group_size) == (theirs.bits, theirs.group_size)
    for cache in (ours, theirs):
        cache.update_and_fetch(new, new)
    assert (hasattr(ours, "bits"), hasattr(theirs, "bits")) == (False, True)
    ours.update_and_fetch(new[:, :, :1], new[:, :, :1])
    assert ours.bits == 8
    assert not hasattr(KVCache(8, packed_decode=False), "bits")


@line("`state`")
def check_state() -> None:
    for bits, planes in ((None, 1), (8, 3)):
        keys, values, *_ = filled(KVCache(bits), 5).state
        assert (type(keys), len(keys), len(values)) == (tuple, planes, planes)
    assert isinstance(filled(stock.KVCache(), 5).state[0], mx.array)


@line("`keys`, `values`")
def check_buffers() -> None:
    ours, theirs = ([filled(kind(), n) for n in (5, 300)] for kind in (KVCache, stock.KVCache))
    assert [cache.keys.shape[2] for cache in theirs] == [256, 512]
    assert stock.KVCache.merge(theirs).keys.shape[2] == 300
    merged = KVCache.merge(ours)
    assert merged.keys.shape[2] % 256 == 0
    merged.filter([0])
    assert merged.keys.shape[2] % 256 == 0


@line("rows of different lengths")
def check_reads() -> None:
    ours, theirs = (filled(kind([3, 0]), 5, rows=2) for kind in (BatchKVCache, stock.BatchKVCache))
    assert ours.make_mask(1).shape == (2, 1, 1, 16)
    assert theirs.make_mask(1).shape == (2, 1, 1, 6)


@line("`left_padding`")
def check_left_padding() -> None:
    ours, theirs = (kind([3, 0]) for kind in (BatchKVCache, stock.BatchKVCache))
    assert ours.left_padding.tolist() == theirs.left_padding.tolist() == [3, 0]
    assert (filled(ours, 5, rows=2).left_padding.tolist(), filled(theirs, 5, rows=2).left_padding.tolist()) == (
        [0, 0],
        [3, 0],
    )


@line("`offset` of a batch")
def check_offsets() -> None:
    ours, theirs = (filled(kind([0, 0]), 5, rows=2) for kind in (BatchKVCache, stock.BatchKVCache))
    assert (ours.offset, theirs.offset.tolist()) == (5, [5, 5])


@line("`make_mask(1, window_size=...)` of a rotating cache")
def check_masks() -> None:
    ours, theirs = (filled(kind(8), 10) for kind in (RotatingKVCache, stock.RotatingKVCache))
    assert (ours.make_mask(1, window_size=5).shape, theirs.make_mask(1, window_size=5).shape) == ((1, 8), (8,))


@line("`trim_prompt_cache` of a ring that wrapped")
def check_trims_of_rings() -> None:
    assert trim_prompt_cache([filled(RotatingKVCache(8), 20, 3)], 3) == 3
    assert stock.trim_prompt_cache([filled(stock.RotatingKVCache(8), 20, 3)], 3) == 0
    ring = filled(RingKVCache(8, max_write=4, max_rollback=6), 20, *[1] * 8)
    assert trim_prompt_cache([ring], 7) == 0
    assert trim_prompt_cache([ring], 6) == 6


@line("integers as keys")
def check_integers() -> None:
    new = mx.zeros((1, 2, 3, 64), mx.int32)
    assert stock.KVCache().update_and_fetch(new, new)[0].dtype == mx.int32
    with pytest.raises(ValueError, match="expected floating point"):
        KVCache().update_and_fetch(new, new)
