"""What a step of decoding costs the host: mlx-lm's caches against ours, layer by layer, before anything is computed.

    python benchmarks/host.py [--rounds 300]

The physics. A step of a small model on a GPU is over in less time than Python takes to describe it, so what a cache
does in Python for each layer and token is a ceiling of tokens per second. MLX's own share is known: a slice that is
written costs about 2 us and a slice that is read 1.4 us on a CPU of 2.5 GHz, so both caches have at least two of each
for keys and values, and a full ring, of which all slots are read, has only the writes.

24 layers of 2 heads x 32 in float32; a round is one mask and 24 updates of one token, as a model asks for them; what
they are to compute is computed between rounds and not counted. Sides take turns; figures are medians, in microseconds a
layer, the mask included; ratios are mlx-lm / ours (more than 1: ours is faster). One JSON line last.
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


def main() -> None:
    got = measure(rounds_from_command_line(__doc__, 300))
    line: dict[str, Any] = {"benchmark": "host", "device": str(mx.default_device())}
    for side, microseconds in got.items():
        peer = PEERS.get(side)
        told = "" if peer is None else f"  {got[peer] / microseconds:5.2f} x as fast as {peer}"
        print(f"  {side:<15} {microseconds:6.2f} us a layer and token{told}", file=sys.stderr)
        line[side.replace("mlx-lm, ", "mlx_lm_").replace(" ", "_")] = round(microseconds, 2)
        if peer is not None:
            line[f"{side.replace(' ', '_')}_ratio"] = round(got[peer] / microseconds, 3)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
