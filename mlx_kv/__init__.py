"""mlx-kv: Composable KV caches for language models on MLX.

The public API is what `__all__` lists. Names are imported when they are first used: importing the package loads a tuned
BLAS where MLX needs one (a Linux CPU), which must come before MLX, and nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mlx_kv import blas

if TYPE_CHECKING:
    from mlx_kv.bundled import bundled_models, model_path
    from mlx_kv.cache.codecs import codec_names, register_codec
    from mlx_kv.cache.eviction.calibration import Calibration
    from mlx_kv.cache.eviction.scores import ScoredTokens, Wants, register_score, score_names
    from mlx_kv.cache.factories import (
        BatchKVCache,
        BatchRotatingKVCache,
        ChunkedKVCache,
        CompressedKVCache,
        QuantizedKVCache,
        RingBufferKVCache,
        RingKVCache,
        RotatingKVCache,
    )
    from mlx_kv.cache.growth import FixedStep, Geometric, Growth, Tapered
    from mlx_kv.cache.kv_cache import KVCache
    from mlx_kv.cache.protocol import Cache
    from mlx_kv.calibration import calibrate
    from mlx_kv.files.calibration_file import load_calibration, save_calibration
    from mlx_kv.files.serialization import load_prompt_cache, save_prompt_cache
    from mlx_kv.generation.generate import batch_generate, generate, speculative_generate, stream_generate
    from mlx_kv.generation.sampling import TemperatureSampler
    from mlx_kv.generation.sequence import BatchToken
    from mlx_kv.generation.settings import SamplingSettings
    from mlx_kv.generation.speculation.drafters import Drafter, drafter_names, register_drafter
    from mlx_kv.generation.statistics import CacheStatistics, SpeculationStatistics, cache_statistics
    from mlx_kv.mlxlm.attention import show_attention
    from mlx_kv.mlxlm.convert import make_prompt_cache
    from mlx_kv.mlxlm.loading import load
    from mlx_kv.mlxlm.traverse import can_trim_prompt_cache, compact, trim_prompt_cache
    from mlx_kv.policy import CachePolicy
    from mlx_kv.prefixes.memory import PromptMemory
    from mlx_kv.prefixes.reader import PromptReader
    from mlx_kv.prefixes.store import PromptStore
    from mlx_kv.ranks.group import RankGroup, join_ranks
    from mlx_kv.ranks.splitting import load_part

__version__ = "0.3.0"

blas.preload()

_HOMES = {
    "BatchKVCache": "cache.factories",
    "BatchRotatingKVCache": "cache.factories",
    "BatchToken": "generation.sequence",
    "Cache": "cache.protocol",
    "CachePolicy": "policy",
    "Calibration": "cache.eviction.calibration",
    "CacheStatistics": "generation.statistics",
    "ChunkedKVCache": "cache.factories",
    "CompressedKVCache": "cache.factories",
    "Drafter": "generation.speculation.drafters",
    "FixedStep": "cache.growth",
    "Geometric": "cache.growth",
    "Growth": "cache.growth",
    "KVCache": "cache.kv_cache",
    "QuantizedKVCache": "cache.factories",
    "RingBufferKVCache": "cache.factories",
    "RingKVCache": "cache.factories",
    "RotatingKVCache": "cache.factories",
    "PromptMemory": "prefixes.memory",
    "PromptReader": "prefixes.reader",
    "PromptStore": "prefixes.store",
    "RankGroup": "ranks.group",
    "SamplingSettings": "generation.settings",
    "ScoredTokens": "cache.eviction.scores",
    "SpeculationStatistics": "generation.statistics",
    "Tapered": "cache.growth",
    "TemperatureSampler": "generation.sampling",
    "Wants": "cache.eviction.scores",
    "batch_generate": "generation.generate",
    "bundled_models": "bundled",
    "cache_statistics": "generation.statistics",
    "calibrate": "calibration",
    "can_trim_prompt_cache": "mlxlm.traverse",
    "codec_names": "cache.codecs",
    "compact": "mlxlm.traverse",
    "drafter_names": "generation.speculation.drafters",
    "generate": "generation.generate",
    "join_ranks": "ranks.group",
    "load": "mlxlm.loading",
    "load_calibration": "files.calibration_file",
    "load_part": "ranks.splitting",
    "load_prompt_cache": "files.serialization",
    "make_prompt_cache": "mlxlm.convert",
    "model_path": "bundled",
    "register_codec": "cache.codecs",
    "register_drafter": "generation.speculation.drafters",
    "register_score": "cache.eviction.scores",
    "save_calibration": "files.calibration_file",
    "save_prompt_cache": "files.serialization",
    "score_names": "cache.eviction.scores",
    "show_attention": "mlxlm.attention",
    "speculative_generate": "generation.generate",
    "stream_generate": "generation.generate",
    "trim_prompt_cache": "mlxlm.traverse",
}

__all__ = [
    "BatchKVCache",
    "BatchRotatingKVCache",
    "BatchToken",
    "Cache",
    "CachePolicy",
    "CacheStatistics",
    "Calibration",
    "ChunkedKVCache",
    "CompressedKVCache",
    "Drafter",
    "FixedStep",
    "Geometric",
    "Growth",
    "KVCache",
    "PromptMemory",
    "PromptReader",
    "PromptStore",
    "QuantizedKVCache",
    "RankGroup",
    "RingBufferKVCache",
    "RingKVCache",
    "RotatingKVCache",
    "SamplingSettings",
    "ScoredTokens",
    "SpeculationStatistics",
    "Tapered",
    "TemperatureSampler",
    "Wants",
    "batch_generate",
    "bundled_models",
    "cache_statistics",
    "calibrate",
    "can_trim_prompt_cache",
    "codec_names",
    "compact",
    "drafter_names",
    "generate",
    "join_ranks",
    "load",
    "load_calibration",
    "load_part",
    "load_prompt_cache",
    "make_prompt_cache",
    "model_path",
    "register_codec",
    "register_drafter",
    "register_score",
    "save_calibration",
    "save_prompt_cache",
    "score_names",
    "show_attention",
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
