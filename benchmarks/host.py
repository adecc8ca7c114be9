"""What a step of decoding costs the host: mlx-lm's caches against ours, layer by layer, before anything is computed.

    python benchmarks/host.py [--rounds 300]

The physics. A step of a small model on a GPU is over in less time than Python takes to describe it, so what a cache
does in Python for each layer and token is a ceiling of tokens per second. MLX's own share is known: a slice that is
written costs about 2 us and a slice that is read 1.4 us on a CPU of 2.5 GHz, so both caches have at least two of each
for keys and values, and a full ring, of which all slots are read, has only the writes.

24 layers of 2 heads x 32 in float32; a round is one mask and 24 updates of one token, as a model asks for them; what
they are to compute is computed between rounds and not counted. Sides take turns; figures are medians, in microseconds a
layer, the mask included; ratios are mlx-lm / ours (more than 1: ours is faster).

Newest tokens as they came (`residual_length=64`) are compared with the same codec without them, after prompts of
several lengths and in a batch of four rows of different lengths: ratios are without / with (0.77: 1.3 times the host
time), of updates alone, and of updates and the attention over them, which has two products more.

Then the slowest of the first 64 steps after a prompt of four windows, computed, in milliseconds for all layers: a ring
gives up the room of the prompt there, mlx-lm's puts its tokens in order. One JSON line last.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import CompressedKVCache, KVCache, RingKVCache

# isort: split
import mlx.core as mx
import mlx_lm.models.cache as stock
from common import rounds_from_command_line
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_kv.mlxlm.attention import AttentionCall

LAYERS, HEADS, DIM, PROMPT = 24, 2, 32, 300
WINDOW = 256
SIDES: dict[str, Callable[[], Any]] = {
    "mlx-lm, plain": stock.KVCache,
    "plain": KVCache,
    "mlx-lm, 8 bits": lambda: stock.QuantizedKVCache(32, 8),
    "8 bits": lambda: KVCache(8, 32),
    "mlx-lm, window": lambda: stock.RotatingKVCache(WINDOW),
    "window": lambda: RingKVCache(WINDOW, 64),
    "budget": lambda: CompressedKVCache(WINDOW, max_write=64),
}
PEERS = {"plain": "mlx-lm, plain", "8 bits": "mlx-lm, 8 bits", "window": "mlx-lm, window", "budget": "mlx-lm, plain"}


ROTATED: dict[str, Any] = {"bits": 4, "group_size": 32, "codec": "rotated"}
NEWEST: dict[str, Callable[[], KVCache]] = {
    "without": lambda: KVCache(**ROTATED),
    "with": lambda: KVCache(**ROTATED, residual_length=64),
}
CASES = {"300 tokens": (300, 1), "8,192 tokens": (8192, 1), "32,768 tokens": (32768, 1), "4 ragged rows": (2048, 4)}
LONG = 1024  # the window of which four are read


def prepared(make: Callable[[], Any], k: mx.array) -> list[Any]:
    """Caches of all layers that have read a prompt and decode."""
    caches, prompt = [make() for _ in range(LAYERS)], mx.zeros((1, HEADS, PROMPT // 6, DIM))
    for cache in caches:
        for tokens in [prompt] * 6 + [k] * 40:
            mx.eval(cache.update_and_fetch(tokens, tokens))
    return caches


def measure(rounds: int) -> dict[str, float]:
    k = mx.zeros((1, HEADS, 1, DIM))
    mx.eval(k)
    caches = {side: prepared(make, k) for side, make in SIDES.items()}
    spent: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in list(SIDES)[:: 1 if number % 2 else -1]:
            layers = caches[side]
            started = time.perf_counter()
            layers[0].make_mask(1, return_array=False, window_size=WINDOW if "window" in side else None)
            fetched = [cache.update_and_fetch(k, k) for cache in layers]
            spent[side].append(time.perf_counter() - started)
            mx.eval(fetched)
            del fetched
    return {side: statistics.median(times) / LAYERS * 1e6 for side, times in spent.items()}


def long_read(make: Callable[[], KVCache], tokens: int, rows: int) -> list[KVCache]:
    """Caches of all layers that have read prompts of different lengths, and show their attention."""
    x = mx.zeros((rows, HEADS, tokens, DIM))
    caches = [KVCache.merge([make() for _ in range(rows)]) for _ in range(LAYERS)]
    for cache in caches:
        cache.carry(cache)
        cache.prepare(lengths=[tokens - 7 * row for row in range(rows)])
        for first in range(0, tokens, 512):
            part = x[:, :, first : first + 512]
            mx.eval(cache.update_and_fetch(part, part))
        cache.finalize()
    return caches


def attended(cache: KVCache, queries: mx.array, fetched: Any, mask: Any) -> mx.array:
    """What a layer of a model builds after an update."""
    named = {"cache": cache, "scale": 1.0, "mask": mask}
    call = AttentionCall(scaled_dot_product_attention, (queries, *fetched), named)
    return call.forward() if cache.attention_hook is None else cache.attention_hook.attend(call)


def measure_newest(tokens: int, rows: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Microseconds a layer, without newest tokens as they came and with: of updates, and with attention."""
    k, queries = mx.zeros((rows, HEADS, 1, DIM)), mx.zeros((rows, 2 * HEADS, 1, DIM))
    mx.eval(k, queries)
    caches = {side: long_read(make, tokens, rows) for side, make in NEWEST.items()}
    spent: dict[str, list[tuple[float, float]]] = {side: [] for side in NEWEST}
    for number in range(rounds + 4):
        for side in list(NEWEST)[:: 1 if number % 2 else -1]:
            layers = caches[side]
            started = time.perf_counter()
            mask = layers[0].make_mask(1)
            fetched = [cache.update_and_fetch(k, k) for cache in layers]
            updated = time.perf_counter()
            outputs = [attended(cache, queries, own, mask) for cache, own in zip(layers, fetched, strict=True)]
            spent[side].append((updated - started, time.perf_counter() - started))
            mx.eval(outputs)
            del fetched, outputs
    unit = 1e6 / LAYERS
    return {
        side: (statistics.median(a for a, _ in times[4:]) * unit, statistics.median(b for _, b in times[4:]) * unit)
        for side, times in spent.items()
    }


def slowest_after_a_prompt() -> dict[str, float]:
    """Milliseconds of the slowest of the first 64 steps, of all layers, computed; the median of five prompts."""
    k, prompt = mx.zeros((1, HEADS, 1, DIM)), mx.zeros((1, HEADS, LONG // 2, DIM))
    mx.eval(k, prompt)
    makes = {"mlx-lm": lambda: stock.RotatingKVCache(LONG), "ours": lambda: RingKVCache(LONG, LONG // 2)}
    slowest: dict[str, list[float]] = {side: [] for side in makes}
    for _ in range(5):
        for side, make in makes.items():
            layers: list[Any] = [make() for _ in range(LAYERS)]
            for _ in range(8):
                mx.eval([cache.update_and_fetch(prompt, prompt) for cache in layers])
            steps = []
            for _ in range(64):
                started = time.perf_counter()
                layers[0].make_mask(1, window_size=LONG)
                mx.eval([cache.update_and_fetch(k, k) for cache in layers])
                steps.append(time.perf_counter() - started)
            slowest[side].append(max(steps))
    return {side: statistics.median(times) * 1e3 for side, times in slowest.items()}


def main() -> None:
    rounds = rounds_from_command_line(__doc__, 300)
    got = measure(rounds)
    line: dict[str, Any] = {"benchmark": "host", "device": str(mx.default_device())}
    for side, microseconds in got.items():
        peer = PEERS.get(side)
        told = "" if peer is None else f"  {got[peer] / microseconds:5.2f} x as fast as {peer}"
        print(f"  {side:<15} {microseconds:6.2f} us a layer and token{told}", file=sys.stderr)
        line[side.replace("mlx-lm, ", "mlx_lm_").replace(" ", "_")] = round(microseconds, 2)
        if peer is not None:
            line[f"{side.replace(' ', '_')}_ratio"] = round(got[peer] / microseconds, 3)
    for case, (tokens, rows) in CASES.items():
        newest = measure_newest(tokens, rows, max(5, min(rounds, 400_000 // tokens)))
        for which, name in enumerate(("updates", "updates and attention")):
            without, with_them = newest["without"][which], newest["with"][which]
            figures = f"{with_them:6.2f} us a layer and token, {without / with_them:5.2f} x as fast as without"
            print(f"  newest 64 as they came, {case}, {name}: {figures}", file=sys.stderr)
            key = f"residual_{case.replace(',', '').replace(' ', '_')}"
            line[key + ("_attention_ratio" if which else "_ratio")] = round(without / with_them, 3)
    slowest = slowest_after_a_prompt()
    print(
        f"  slowest step after a prompt, window: ours {slowest['ours']:.1f} ms, mlx-lm's {slowest['mlx-lm']:.1f} ms",
        file=sys.stderr,
    )
    line |= {"window_slowest_ms": round(slowest["ours"], 2), "mlx_lm_window_slowest_ms": round(slowest["mlx-lm"], 2)}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
