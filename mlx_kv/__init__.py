"""mlx-kv: KV caches for language models on MLX that combine.

The public API is what `__all__` lists. Names are imported when they are first used: importing the package loads a tuned
BLAS where MLX needs one (a Linux CPU), which must come before MLX, and nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mlx_kv import blas

if TYPE_CHECKING:
    from mlx_kv.adapter import compact, load, make_prompt_cache, trim_prompt_cache
    from mlx_kv.batch_generation import batch_generate
    from mlx_kv.bundled import bundled_models, model_path
    from mlx_kv.cache import KVCache
    from mlx_kv.decoder import SpeculationStatistics
    from mlx_kv.engine import BatchToken
    from mlx_kv.eviction.scores import register_score, score_names
    from mlx_kv.generation import CacheStatistics, cache_statistics, stream_generate
    from mlx_kv.growth import FixedStep, Geometric, Growth
    from mlx_kv.named import (
        BatchKVCache,
        BatchRotatingKVCache,
        ChunkedKVCache,
        CompressedKVCache,
        QuantizedKVCache,
        RingBufferKVCache,
        RingKVCache,
        RotatingKVCache,
    )
    from mlx_kv.policy import CachePolicy
    from mlx_kv.prompt_memory import PromptMemory
    from mlx_kv.prompt_reader import PromptReader
    from mlx_kv.prompt_store import PromptStore
    from mlx_kv.protocol import Cache
    from mlx_kv.sampling import TemperatureSampler
    from mlx_kv.serialization import load_prompt_cache, save_prompt_cache
    from mlx_kv.speculative import speculative_generate

__version__ = "0.1.0"

blas.preload()

_HOMES = {
    "BatchKVCache": "named",
    "BatchRotatingKVCache": "named",
    "BatchToken": "engine",
    "Cache": "protocol",
    "CachePolicy": "policy",
    "CacheStatistics": "generation",
    "ChunkedKVCache": "named",
    "CompressedKVCache": "named",
    "FixedStep": "growth",
    "Geometric": "growth",
    "Growth": "growth",
    "KVCache": "cache",
    "QuantizedKVCache": "named",
    "RingBufferKVCache": "named",
    "RingKVCache": "named",
    "RotatingKVCache": "named",
    "PromptMemory": "prompt_memory",
    "PromptReader": "prompt_reader",
    "PromptStore": "prompt_store",
    "SpeculationStatistics": "decoder",
    "TemperatureSampler": "sampling",
    "batch_generate": "batch_generation",
    "bundled_models": "bundled",
    "cache_statistics": "generation",
    "compact": "adapter",
    "load": "adapter",
    "load_prompt_cache": "serialization",
    "make_prompt_cache": "adapter",
    "model_path": "bundled",
    "register_score": "eviction.scores",
    "save_prompt_cache": "serialization",
    "score_names": "eviction.scores",
    "speculative_generate": "speculative",
    "stream_generate": "generation",
    "trim_prompt_cache": "adapter",
}

__all__ = [
    "BatchKVCache",
    "BatchRotatingKVCache",
    "BatchToken",
    "Cache",
    "CachePolicy",
    "CacheStatistics",
    "ChunkedKVCache",
    "CompressedKVCache",
    "FixedStep",
    "Geometric",
    "Growth",
    "KVCache",
    "PromptMemory",
    "PromptReader",
    "PromptStore",
    "QuantizedKVCache",
    "RingBufferKVCache",
    "RingKVCache",
    "RotatingKVCache",
    "SpeculationStatistics",
    "TemperatureSampler",
    "batch_generate",
    "bundled_models",
    "cache_statistics",
    "compact",
    "load",
    "load_prompt_cache",
    "make_prompt_cache",
    "model_path",
    "register_score",
    "save_prompt_cache",
    "score_names",
    "speculative_generate",
    "stream_generate",
    "trim_prompt_cache",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
