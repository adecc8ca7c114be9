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
    from mlx_kv.calibration.drafter import train_drafter
    from mlx_kv.files.calibration_file import load_calibration, save_calibration
    from mlx_kv.files.serialization import load_prompt_cache, save_prompt_cache
    from mlx_kv.generation.generate import batch_generate, generate, speculative_generate, stream_generate
    from mlx_kv.generation.images import ImagePrompt, encode_images
    from mlx_kv.generation.sampling import TemperatureSampler
    from mlx_kv.generation.sequence import BatchToken
    from mlx_kv.generation.settings import SamplingSettings
    from mlx_kv.generation.speculation.drafters import Drafter, drafter_names, register_drafter
    from mlx_kv.generation.statistics import CacheStatistics, SpeculationStatistics, cache_statistics
    from mlx_kv.mlxlm.attention import show_attention
    from mlx_kv.mlxlm.convert import make_prompt_cache
    from mlx_kv.mlxlm.head_files import load_draft_head, save_draft_head
    from mlx_kv.mlxlm.loading import load
    from mlx_kv.mlxlm.traverse import can_trim_prompt_cache, compact, trim_prompt_cache
    from mlx_kv.policy import CachePolicy
    from mlx_kv.prefixes.memory import PromptMemory
    from mlx_kv.prefixes.reader import PromptReader
    from mlx_kv.prefixes.store import PromptStore
    from mlx_kv.ranks.group import RankGroup, join_ranks
    from mlx_kv.ranks.splitting import load_part

__version__ = "0.4.0"

blas.preload()

# The same by module, for imports at the first use.
_NAMES: dict[str, tuple[str, ...]] = {
    "bundled": ("bundled_models", "model_path"),
    "cache.codecs": ("codec_names", "register_codec"),
    "cache.eviction.calibration": ("Calibration",),
    "cache.eviction.scores": ("ScoredTokens", "Wants", "register_score", "score_names"),
    "cache.factories": (
        "BatchKVCache",
        "BatchRotatingKVCache",
        "ChunkedKVCache",
        "CompressedKVCache",
        "QuantizedKVCache",
        "RingBufferKVCache",
        "RingKVCache",
        "RotatingKVCache",
    ),
    "cache.growth": ("FixedStep", "Geometric", "Growth", "Tapered"),
    "cache.kv_cache": ("KVCache",),
    "cache.protocol": ("Cache",),
    "calibration": ("calibrate",),
    "calibration.drafter": ("train_drafter",),
    "files.calibration_file": ("load_calibration", "save_calibration"),
    "files.serialization": ("load_prompt_cache", "save_prompt_cache"),
    "generation.generate": ("batch_generate", "generate", "speculative_generate", "stream_generate"),
    "generation.images": ("ImagePrompt", "encode_images"),
    "generation.sampling": ("TemperatureSampler",),
    "generation.sequence": ("BatchToken",),
    "generation.settings": ("SamplingSettings",),
    "generation.speculation.drafters": ("Drafter", "drafter_names", "register_drafter"),
    "generation.statistics": ("CacheStatistics", "SpeculationStatistics", "cache_statistics"),
    "mlxlm.attention": ("show_attention",),
    "mlxlm.convert": ("make_prompt_cache",),
    "mlxlm.head_files": ("load_draft_head", "save_draft_head"),
    "mlxlm.loading": ("load",),
    "mlxlm.traverse": ("can_trim_prompt_cache", "compact", "trim_prompt_cache"),
    "policy": ("CachePolicy",),
    "prefixes.memory": ("PromptMemory",),
    "prefixes.reader": ("PromptReader",),
    "prefixes.store": ("PromptStore",),
    "ranks.group": ("RankGroup", "join_ranks"),
    "ranks.splitting": ("load_part",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

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
    "ImagePrompt",
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
    "encode_images",
    "generate",
    "join_ranks",
    "load",
    "load_calibration",
    "load_draft_head",
    "load_part",
    "load_prompt_cache",
    "make_prompt_cache",
    "model_path",
    "register_codec",
    "register_drafter",
    "register_score",
    "save_calibration",
    "save_draft_head",
    "save_prompt_cache",
    "score_names",
    "show_attention",
    "speculative_generate",
    "stream_generate",
    "train_drafter",
    "trim_prompt_cache",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
