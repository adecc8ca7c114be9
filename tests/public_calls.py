"""Every public name of mlx_kv: a call of it that works, and arguments that fit nowhere.

As a script, gives each of these to every argument that takes token ids, and prints what came of it: what is not refused
may be the end of the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx_kv

# isort: split
import mlx.core as mx
import numpy as np
from calibration_calls import CALIBRATION_CALLS
from calls import REFUSED, TAKEN, Call, enough, few, filled, folder, growing, models, stored

__all__ = ["CALLS", "IDS", "MISFITS", "REFUSED", "TAKEN", "Call", "folder", "tried"]

IDS = {"before", "prompt", "prompts", "tokens"}
# As they are, or in a list: nothing that all arguments take.
MISFITS: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 5.9, float("nan"), float("inf"), 2**31, 2**80, 10**400),
    *("", "x", "reference", "\ud800", b"x", {}, {"bits": 8}, {"a": [1]}, set(), object(), Path("x"), iter([1])),
    *([], [None], ["x"], [5.9], [-1], [True], [2**80], [[[[1]]]], ["a", {"x": 1}], (1, 2, 3), [{"role": 5}]),
    *(mx.array(1.5), mx.array([[1, 2]]), mx.array([1.5]), np.array([[1.5, 2.0]]), np.array([True])),
    lambda *_, **__: None,
)
WRONG_IDS: tuple[Any, ...] = (
    *([2**31 - 1], [5, 4096, 7], [-1], [5.9], [2**31], [2**63], [2**80], [True], [None], ["5"], [[5]], b"abc", 5),
    *(mx.array([4096]), mx.array([5.0]), mx.array([[5, 6]]), mx.array(5), mx.array([-1])),
    mx.array([2**32 - 1], mx.uint32),
    *(np.array([4096]), np.array([5.9]), np.array([[5, 6]]), np.array([-1]), np.array([2**40]), np.array([True])),
)


def generation() -> dict[str, Any]:
    model, tokenizer, _ = models()
    return {"model": model, "tokenizer": tokenizer, "prompt": [5, 6, 7], "max_tokens": 2}


COMMON = ("policy", "sampler", "prompt_cache", "seed", "group", "logits_processors", "prefill_step_size")
STREAM = dict.fromkeys((*COMMON, "prompt_progress_callback", "max_kv_size", "input_embeddings", "bits", "surprise"))
GENERATE = {**STREAM, **dict.fromkeys(("sampling", "stop", "draft_model", "drafter"))}
DRAFTING = ("statistics", "drafter", "num_draft_tokens", "prompt_lookup_min", "prompt_lookup_max")
SPECULATE = dict.fromkeys((*COMMON, *DRAFTING, "prompt_progress_callback", "before"))
FUNCTIONS = frozenset({"sampler", "on_text", "prompt_progress_callback", "logits_processors"})


def batch() -> dict[str, Any]:
    known = generation()
    del known["prompt"]
    same = {name: None for name in SPECULATE if name not in ("prompt_cache", "before", "prompt_progress_callback")}
    more = {"prompts": [[5, 6, 7]], "max_batch_size": None, "draft_model": None, "draft_length": "fixed"}
    return {**same, **known, **more}


def reader(**arguments: Any) -> list[Any]:
    return mlx_kv.PromptReader(**arguments).finish()


def reading() -> dict[str, Any]:
    model = models()[0]
    caches = mlx_kv.make_prompt_cache(model)
    return {"model": model, "caches": caches, "tokens": [5, 6, 7], "store": None, "step": None, "instructions": None}


def kept(place: Callable[[], Any], method: str) -> Call:
    """A call of a method of a place that keeps prompts."""

    def arguments() -> dict[str, Any]:
        return {"tokens": [5] * 64, "caches": filled()} if method == "keep" else {"tokens": [5] * 64}

    return Call(lambda **given: getattr(place(), method)(**given), arguments)


def memory() -> Any:
    return mlx_kv.PromptMemory(fingerprint="x")


def store() -> Any:
    return mlx_kv.PromptStore(folder() / "store", fingerprint="x")


def names(*some: str) -> Callable[[], dict[str, Any]]:
    return lambda: dict.fromkeys(some)


STORED = ("bits", "group_size", "growth", "reserve", "packed_decode", "codec", "residual_length")
OF_BUDGETS = ("keep_recent", "sinks", "score", "share", "margin")
PACKED = frozenset({"packed_decode"})
RESULT = "made by this package: what it holds is not looked at"
CALLS: dict[str, list[Call] | str] = {
    "BatchKVCache": [Call(mlx_kv.BatchKVCache, lambda: {"left_padding": [0]}, stored)],
    "BatchRotatingKVCache": [Call(mlx_kv.BatchRotatingKVCache, lambda: {"max_size": 16, "left_padding": [0]}, stored)],
    "BatchToken": RESULT,
    "Cache": "a protocol",
    "CachePolicy": [
        Call(
            mlx_kv.CachePolicy,
            names(*(field.name for field in fields(mlx_kv.CachePolicy))),
            lambda policy: stored(policy.make_cache()),
            frozenset({"score"}),
        ),
        Call(
            mlx_kv.CachePolicy,
            lambda: {"budget": 100, **dict.fromkeys((*OF_BUDGETS, "layers"))},
            lambda policy: stored(policy.make_cache()),
            frozenset({"score"}),
        ),
    ],
    "CacheStatistics": RESULT,
    **CALIBRATION_CALLS,
    "ChunkedKVCache": [
        Call(
            mlx_kv.ChunkedKVCache,
            lambda: {"chunk_size": 16, **dict.fromkeys(("max_write", "max_rollback", *STORED))},
            stored,
            flags=PACKED,
        )
    ],
    "CompressedKVCache": [
        Call(
            mlx_kv.CompressedKVCache,
            lambda: {"budget": 100, **dict.fromkeys(("max_write", *OF_BUDGETS, *STORED))},
            stored,
            frozenset({"score"}),
            PACKED,
        )
    ],
    "Drafter": "a protocol, with what a drafter of one's own inherits",
    "FixedStep": [Call(mlx_kv.FixedStep, names("step"), growing)],
    "Geometric": [Call(mlx_kv.Geometric, names("factor", "max_increment", "max_capacity"), growing)],
    "Growth": "a protocol",
    "ImagePrompt": RESULT,
    "KVCache": [
        Call(mlx_kv.KVCache, names(*STORED, "quantized_start", "layout", "evictor"), stored, flags=PACKED),
        Call(lambda n: filled()[0].trim(n), lambda: {"n": 1}),
        Call(lambda n: filled()[0].trim_per_sequence(n), lambda: {"n": [1]}),
        Call(lambda n: filled()[0].can_trim(n), lambda: {"n": 1}),
        Call(lambda tokens_in_all: filled()[0].reserve(tokens_in_all), lambda: {"tokens_in_all": 1}),
        Call(lambda rows: filled()[0].filter(rows), lambda: {"rows": [0]}),
        Call(lambda keys: filled()[0].update_and_fetch(keys, keys), lambda: {"keys": mx.zeros((1, 2, 1, 64))}),
    ],
    "PromptMemory": [
        Call(mlx_kv.PromptMemory, names("max_bytes", "fingerprint")),
        *(kept(memory, method) for method in ("find", "keep", "serves", "forget")),
    ],
    "PromptReader": [Call(reader, reading, calls=frozenset({"model"}))],
    "PromptStore": [
        Call(
            mlx_kv.PromptStore,
            lambda: {"directory": folder() / "new", "max_bytes": None, "deadline": None},
            raises=(UnicodeEncodeError,),
        ),
        *(kept(store, method) for method in ("find", "keep", "serves")),
    ],
    "QuantizedKVCache": [Call(mlx_kv.QuantizedKVCache, names("group_size", "bits"), stored)],
    "RankGroup": "made by join_ranks",
    "RingBufferKVCache": [Call(mlx_kv.RingBufferKVCache, lambda: {"window": 16, "max_write": None}, stored)],
    "RingKVCache": [
        Call(
            mlx_kv.RingKVCache,
            lambda: {"window": 16, **dict.fromkeys(("max_write", "sinks", "max_rollback", *STORED))},
            stored,
            flags=PACKED,
        )
    ],
    "RotatingKVCache": [Call(mlx_kv.RotatingKVCache, lambda: {"max_size": 16, "keep": None}, stored)],
    "SamplingSettings": [
        Call(
            mlx_kv.SamplingSettings,
            names(*(field.name for field in fields(mlx_kv.SamplingSettings))),
            lambda settings: (settings.sampler(3), settings.processors()),
        )
    ],
    "ScoredTokens": RESULT,
    "SpeculationStatistics": RESULT,
    "Tapered": [Call(mlx_kv.Tapered, names("max_increment"), growing)],
    "TemperatureSampler": [
        Call(
            mlx_kv.TemperatureSampler,
            lambda: {
                "temp": 1.0,
                **dict.fromkeys(("top_p", "min_p", "top_k", "xtc_probability", "xtc_threshold")),
            },
            lambda sampler: sampler(mx.zeros((1, 96))),
        )
    ],
    "Wants": [Call(mlx_kv.Wants, lambda: {"queries": 1, "received": None})],
    "batch_generate": [
        Call(mlx_kv.batch_generate, batch, few, FUNCTIONS),
        Call(mlx_kv.batch_generate, lambda: {**batch(), "drafter": "ngram"}, few, FUNCTIONS),
    ],
    "bundled_models": [Call(mlx_kv.bundled_models)],
    "cache_statistics": [Call(mlx_kv.cache_statistics, lambda: {"caches": filled()})],
    "can_trim_prompt_cache": [Call(mlx_kv.can_trim_prompt_cache, lambda: {"caches": filled(), "n": 1})],
    "codec_names": [Call(mlx_kv.codec_names)],
    "compact": [Call(mlx_kv.compact, lambda: {"caches": filled()})],
    "drafter_names": [Call(mlx_kv.drafter_names)],
    "encode_images": "of models of an extra: tests/generation/test_image_prompts.py",
    "generate": [Call(mlx_kv.generate, lambda: {**GENERATE, **generation(), "on_text": enough}, calls=FUNCTIONS)],
    "join_ranks": [Call(mlx_kv.join_ranks, names("split", "settings", "address", "secret"))],
    "load": [
        Call(
            mlx_kv.load,
            lambda: {
                "path_or_hub_id": mlx_kv.model_path("draft"),
                **dict.fromkeys(("adapter_path", "chat_template", "lazy")),
            },
            flags=frozenset({"lazy"}),
        )
    ],
    "load_part": [Call(mlx_kv.load_part, lambda: {"path_or_hub_id": mlx_kv.model_path("draft"), "group": 5})],
    "load_prompt_cache": [
        Call(
            mlx_kv.load_prompt_cache,
            lambda: {"path": folder() / "kept.safetensors", "return_metadata": None},
            flags=frozenset({"return_metadata"}),
            raises=(FileNotFoundError, UnicodeEncodeError),
        )
    ],
    "make_prompt_cache": [
        Call(
            mlx_kv.make_prompt_cache,
            lambda: {"model": models()[0], "policy": None, "strict": None},
            flags=frozenset({"strict"}),
        )
    ],
    "model_path": [Call(mlx_kv.model_path, lambda: {"name_or_path": "reference"})],
    "register_codec": [Call(mlx_kv.register_codec, lambda: {"name": "misfit", "factory": object})],
    "register_drafter": [Call(mlx_kv.register_drafter, lambda: {"name": "misfit", "factory": object})],
    "register_score": [
        Call(
            mlx_kv.register_score,
            lambda: {
                "name": "misfit",
                "function": lambda tokens: tokens.keys[..., 0],
                "per_token": None,
                "wants": None,
            },
            flags=frozenset({"per_token"}),
        )
    ],
    "save_prompt_cache": [
        Call(
            mlx_kv.save_prompt_cache,
            lambda: {
                "path": folder() / "new.safetensors",
                "caches": filled(),
                "tokens": [5, 6, 7],
                "force": True,
                **dict.fromkeys(("metadata", "fingerprint", "format")),
            },
            flags=frozenset({"force"}),
            raises=(OSError, UnicodeEncodeError),
        )
    ],
    "score_names": [Call(mlx_kv.score_names)],
    "show_attention": [
        Call(
            mlx_kv.show_attention,
            lambda: {
                "model": models()[0],
                "caches": mlx_kv.make_prompt_cache(models()[0], mlx_kv.CachePolicy(budget=100, score="snap_kv")),
            },
        )
    ],
    "speculative_generate": [
        Call(
            mlx_kv.speculative_generate,
            lambda: {**SPECULATE, **generation(), "draft_model": models()[2], "draft_length": "fixed"},
            few,
            FUNCTIONS,
        )
    ],
    "stream_generate": [Call(mlx_kv.stream_generate, lambda: {**STREAM, **generation()}, few, FUNCTIONS)],
    "trim_prompt_cache": [
        Call(
            mlx_kv.trim_prompt_cache,
            lambda: {"caches": filled(), "n": 1, "strict": None},
            flags=frozenset({"strict"}),
        )
    ],
}


def tried(call: Call, name: str, wrong: Any) -> str:
    """What comes of one other argument."""
    return TAKEN if callable(wrong) and name in call.calls else call.outcome(**{name: wrong})


def main() -> None:  # prints one line of JSON before each call, and one after it
    os.chdir(folder())
    for public, calls in CALLS.items():
        for call in calls if isinstance(calls, list) else ():
            for name in sorted(IDS & call.arguments().keys()):
                for wrong in (*MISFITS, *WRONG_IDS):
                    ids = any(wrong is each for each in WRONG_IDS)
                    given = [[5], wrong] if name == "prompts" and ids else wrong
                    print(json.dumps([public, name, ids, repr(given)[:80]]), flush=True)
                    print(json.dumps(tried(call, name, given)), flush=True)


if __name__ == "__main__":
    main()
