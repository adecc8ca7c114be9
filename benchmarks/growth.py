"""What growth costs: mlx-lm's KVCache against ours, both in one process.

    python benchmarks/growth.py [--rounds 5]

The physics. One layer of 8 heads x 128 in float16 holds 4,096 bytes per token (keys and values), so 32,768 tokens are
134 MB that must be written once: that is the limit, and it is all that a reserved cache moves. A cache that grows by
256 slots copies all it holds 127 times on the way, 256 * (1 + ... + 127) * 4,096 bytes = 8.5 GB read and written again;
one that doubles copies what it holds 7 times, 133 MB in all. In steady decode attention reads the whole cache for every
token, 256 times as much as the copies of the +256 rule: so look at the spikes and at memory, not for faster decode.

While a chunk of 2,048 is prefilled up to 8,192 tokens, the +256 rule holds the old buffer, the new slots, their
concatenation and the chunk: 6,144 + 2,048 + 8,192 + 2,048 = 18,432 slots. A reserved cache holds 8,192 + 2,048.

Sides take turns within every round; times are medians of the rounds, ratios are mlx-lm / ours (more than 1: ours is
faster). The last line is one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import KVCache, make_prompt_cache, model_path
from mlx_kv.mlxlm.loading import load

# isort: split
import mlx.core as mx
import mlx_lm.models.cache as stock
from common import medians, rounds_from_command_line, take_turns
from mlx_lm.generate import generate_step

HEADS, DIM, TOKENS = 8, 128, 32_768
PREFILL, PREFILL_CHUNK = 8_192, 2_048
CONTEXT, DECODED = 4_096, 128
SIDES: dict[str, Callable[[int], Any]] = {
    "mlx-lm": lambda tokens: stock.KVCache(),
    "ours": lambda tokens: KVCache(),
    "ours, reserved": lambda tokens: KVCache(reserve=tokens),
}


def capacity(cache: Any) -> int:
    return 0 if cache.keys is None else int(cache.keys.shape[2])


def append(make: Callable[[int], Any], tokens: int, chunk: int) -> dict[str, float]:
    """Appends tokens to one layer, evaluating after every update, as a decode or prefill step does."""
    cache, growths, longest = make(tokens), -1, 0.0
    mx.clear_cache()
    before = mx.get_active_memory()
    k, v = (mx.random.normal((1, HEADS, chunk, DIM)).astype(mx.float16) for _ in range(2))
    mx.eval(k, v)
    mx.reset_peak_memory()
    started = time.perf_counter()
    for _ in range(tokens // chunk):
        old, begun = capacity(cache), time.perf_counter()
        fetched = cache.update_and_fetch(k, v)
        mx.eval(fetched)
        del fetched  # a handle that stays would make the next write copy the buffer
        longest = max(longest, time.perf_counter() - begun)
        growths += capacity(cache) != old
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "longest": longest, "growths": growths, "peak": mx.get_peak_memory() - before}


def decode(model: Any, caches: list[Any], last: mx.array) -> float:
    """Tokens per second of mlx-lm's loop from here on."""
    steps = generate_step(last, model, max_tokens=DECODED, prompt_cache=caches)
    next(steps)
    started = time.perf_counter()
    count = sum(1 for _ in steps)
    return count / (time.perf_counter() - started)


def measure_appends(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    cases = {"one by one": (TOKENS, 1), "chunks of 512": (TOKENS, 512), "prefill": (PREFILL, PREFILL_CHUNK)}
    results = {}
    for case, (tokens, chunk) in cases.items():
        sides = {side: lambda make=make: append(make, tokens, chunk) for side, make in SIDES.items()}  # noqa: B023
        results[case] = {side: medians(runs) for side, runs in take_turns(rounds, sides).items()}
        print(f"{tokens:,} tokens, {case}", file=sys.stderr)
        for side, got in results[case].items():
            print(
                f"  {side:<15} {got['growths']:4.0f} growths  {got['seconds']:8.3f} s  "
                f"longest update {got['longest'] * 1e3:7.2f} ms  peak {got['peak'] / 1e6:7.1f} MB",
                file=sys.stderr,
            )
    return results


def measure_decode(rounds: int) -> dict[str, float]:
    model, _ = load(model_path("reference"))
    tokens = mx.random.randint(1, 4096, (CONTEXT,), key=mx.random.key(0))
    caches = {"mlx-lm": stock.make_prompt_cache(model), "ours": make_prompt_cache(model)}
    for side in caches.values():
        for first in range(0, CONTEXT, 512):
            model(tokens[None, first : first + 512], cache=side)
            mx.eval([cache.state for cache in side])

    def once(side: list[Any]) -> float:
        stock.trim_prompt_cache(side, side[0].offset - (CONTEXT - 1))
        return decode(model, side, tokens[-1:])

    runs = take_turns(3 * rounds, {name: lambda side=side: once(side) for name, side in caches.items()})
    best = {name: statistics.median(speeds) for name, speeds in runs.items()}
    print(f"decode of the reference model at {CONTEXT:,} tokens", file=sys.stderr)
    for name, speed in best.items():
        print(f"  {name:<15} {speed:8.1f} tokens/s", file=sys.stderr)
    return best


def summary(appends: dict[str, dict[str, dict[str, float]]], speeds: dict[str, float]) -> dict[str, Any]:
    """The figures and the ratios of the two sides, rounded for reading."""
    single, chunks, prefill = appends["one by one"], appends["chunks of 512"], appends["prefill"]
    line: dict[str, Any] = {"benchmark": "growth", "device": str(mx.default_device())}
    for name, case in (("one_by_one", single), ("chunks_of_512", chunks)):
        for side, short in (("mlx-lm", "mlx_lm"), ("ours", "ours"), ("ours, reserved", "reserved")):
            line[f"{name}_growths_{short}"] = int(case[side]["growths"])
            line[f"{name}_seconds_{short}"] = round(case[side]["seconds"], 4)
            line[f"{name}_longest_update_ms_{short}"] = round(case[side]["longest"] * 1e3, 3)
        for side, short in (("ours", "ours"), ("ours, reserved", "reserved")):
            line[f"{name}_time_ratio_{short}"] = round(case["mlx-lm"]["seconds"] / case[side]["seconds"], 3)
    for side, short in (("ours", "ours"), ("ours, reserved", "reserved")):
        line[f"prefill_peak_memory_{short}_of_mlx_lm"] = round(prefill[side]["peak"] / prefill["mlx-lm"]["peak"], 3)
    line["decode_tokens_per_second_mlx_lm"] = round(speeds["mlx-lm"], 1)
    line["decode_tokens_per_second_ours"] = round(speeds["ours"], 1)
    line["decode_ratio"] = round(speeds["ours"] / speeds["mlx-lm"], 3)
    return line


def main() -> None:
    rounds = rounds_from_command_line(__doc__)
    print(json.dumps(summary(measure_appends(rounds), measure_decode(rounds))))


if __name__ == "__main__":
    main()
