"""Files of mlx-lm: what they hold goes on in caches of this package as in mlx-lm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from going_on import AFTER, PROMPT, feed, tokens_of
from mlx_lm.models import cache as stock
from oracle import Spec, attend
from tiny_models import make_model

from mlx_kv import (
    KVCache,
    load_prompt_cache,
    save_prompt_cache,
)
from mlx_kv.mlxlm.traverse import leaves


def stock_caches(model: nn.Module, kind: str) -> list[Any]:
    if kind == "max_kv_size":
        return [stock.RotatingKVCache(20, keep=4) for _ in model.layers]
    caches = stock.make_prompt_cache(model)
    return [cache.to_quantized(32, 8) for cache in caches] if kind == "quantised" else caches


STOCK_KINDS = {
    "plain": ("llama", "own"),
    "quantised": ("llama", "quantised"),
    "max_kv_size": ("llama", "max_kv_size"),
    "windows": ("gemma3_text", "own"),
    "state and attention": ("falcon_h1", "own"),
    "state or attention": ("lfm2", "own"),
}


@pytest.mark.parametrize(
    ("chunk", "prompt"), [(1, 5), (1, 20), (1, 24), (8, 19), (8, 20), (8, 21), (8, 90), (90, 12), (90, 90)]
)
@pytest.mark.parametrize("kind", STOCK_KINDS)
def test_files_of_mlx_lm_go_on_as_in_mlx_lm(kind: str, chunk: int, prompt: int, tmp_path: Path) -> None:
    family, how = STOCK_KINDS[kind]
    model = make_model(family)
    caches = stock_caches(model, how)
    feed(model, caches, PROMPT[:prompt], chunk)
    stock.save_prompt_cache(str(tmp_path / "a.safetensors"), caches, {"model": "m", "more": "x"})
    loaded, metadata = load_prompt_cache(tmp_path / "a.safetensors", return_metadata=True)
    assert metadata == {"model": "m", "more": "x"}
    assert all(isinstance(cache, (KVCache, stock.ArraysCache)) for cache in leaves(loaded))
    wanted = feed(model, caches, AFTER[:20], 1)
    assert mx.allclose(feed(model, loaded, AFTER[:20], 1), wanted, atol=2e-3, rtol=1e-3).item()


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("chunk", [1, 10])
@pytest.mark.parametrize("keep", [0, 4])
def test_rings_of_mlx_lm_know_what_they_can_take_back(keep: int, chunk: int, rows: int, tmp_path: Path) -> None:
    spec = Spec(ring=20, sinks=keep, max_write=512, rows=rows)
    cache, fresh = stock.RotatingKVCache(20, keep=keep), spec.make()
    _, keys, values = tokens_of(spec, 50, mx.float32, 0)
    for first in range(0, 50, chunk):
        cache.update_and_fetch(keys[:, :, first : first + chunk], values[:, :, first : first + chunk])
    stock.save_prompt_cache(str(tmp_path / "a.safetensors"), [cache])
    loaded = load_prompt_cache(tmp_path / "a.safetensors")[0]
    most = loaded.layout.max_trim(loaded.view.rows[0])
    assert most == chunk  # what the last write left behind the window
    fresh.update_and_fetch(keys[:, :, : 50 - most], values[:, :, : 50 - most])
    with pytest.raises(ValueError, match="cannot trim"):
        loaded.trim(most + 1)
    loaded.trim(most)
    for seed, new in enumerate((1, 7, 1, 30, 600, 1)):
        outputs = [attend(each, *tokens_of(spec, new, mx.float32, seed), None) for each in (loaded, fresh)]
        assert mx.allclose(*outputs, atol=1e-5, rtol=1e-5).item()


def test_files_for_mlx_lm_are_not_written(tmp_path: Path) -> None:
    said = "only mlx-kv is written since 0.4: leave it out, or make files for mlx-lm with mlx_lm.cache_prompt"
    with pytest.raises(ValueError, match=said):
        save_prompt_cache(tmp_path / "a.safetensors", [KVCache()], format="mlx-lm")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_caches_that_are_still_mlx_lms_are_kept_as_they_are(tmp_path: Path) -> None:
    model = make_model("gemma3_text")
    caches = stock.make_prompt_cache(model)
    feed(model, caches, PROMPT, 8)
    save_prompt_cache(tmp_path / "a.safetensors", caches)
    loaded = load_prompt_cache(tmp_path / "a.safetensors")
    assert [type(cache) for cache in loaded] == [type(cache) for cache in caches]
    assert mx.array_equal(feed(model, caches, AFTER, 5), feed(model, loaded, AFTER, 5)).item()
