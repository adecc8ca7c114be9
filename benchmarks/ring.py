"""What a sliding window costs: mlx-lm's RotatingKVCache against our ring, both in one process.

    python benchmarks/ring.py [--rounds 5]

The physics. One layer of 8 heads x 128 in float32, 8,192 bytes per token, window 1,024, a prompt of 4,096 tokens in
chunks of 256, 512 and 2,048, then 1,024 decode steps. A chunk of M needs the last 1,023 tokens and itself, so the least
that a cache can hold is window + M - 1 slots: 1,279 for chunks of 256, 10.5 MB. A ring of that size writes the chunk in
place and copies nothing else; the rotating cache puts what it holds in order and concatenates the chunk, so old and new
buffer exist at once, and it reads and writes all of both for every chunk. In decode both write one token and hand all
slots to attention: mlx-lm's 1,024 without a mask; ours the same where they lie side by side, which is M of R steps, and
else all R with a mask, or a copy where R is more than twice the window. The M - 1 slots more are what a rollback needs.
Our ring is made for the chunk that is used (max_write = chunk) and knows how long the prompt is (reserve), as it does
under stream_generate.

Peak memory includes the chunk. Bytes copied are counted from shapes: what is written besides the new tokens.
Sides take turns; times are medians; ratios are mlx-lm / ours (more than 1: ours is faster). One JSON line last.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import RingKVCache

# isort: split
import mlx.core as mx
import mlx_lm.models.cache as stock
from common import medians, rounds_from_command_line, take_turns

HEADS, QUERY_HEADS, DIM, WINDOW, PROMPT, DECODED = 8, 16, 128, 1_024, 4_096, 1_024
CHUNKS = (256, 512, 2_048)
BYTES_PER_TOKEN = HEADS * DIM * 2 * 4


def attend(cache: Any, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    mask = cache.make_mask(q.shape[2], window_size=WINDOW)
    keys, values = cache.update_and_fetch(k, v)
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=DIM**-0.5, mask=mask)


def tokens(count: int) -> list[mx.array]:
    made = [mx.random.normal((1, heads, count, DIM)).astype(mx.float32) for heads in (QUERY_HEADS, HEADS, HEADS)]
    mx.eval(made)
    return made


def run(make: Callable[[int], Any], chunk: int) -> dict[str, float]:
    """Updates alone for the prompt and its peak memory; then decode steps, with and without their attention."""
    mx.clear_cache()
    before = mx.get_active_memory()
    cache, (_, k, v) = make(chunk), tokens(chunk)
    mx.reset_peak_memory()
    started = time.perf_counter()
    for _ in range(PROMPT // chunk):
        fetched = cache.update_and_fetch(k, v)
        mx.eval(fetched)
        del fetched
    prefill, peak = time.perf_counter() - started, mx.get_peak_memory() - before
    _, k, v = tokens(1)
    fetched = cache.update_and_fetch(k, v)  # the first step after a prompt puts mlx-lm's cache in its final form
    mx.eval(fetched)
    del fetched
    started = time.perf_counter()
    for _ in range(DECODED):
        fetched = cache.update_and_fetch(k, v)
        mx.eval(fetched)
        del fetched
    update = (time.perf_counter() - started) / DECODED
    q, k, v = tokens(1)
    started = time.perf_counter()
    for _ in range(DECODED):
        mx.eval(attend(cache, q, k, v))
    attention = (time.perf_counter() - started) / DECODED
    return {"prefill": prefill, "peak": peak, "update": update, "step": attention, "held": cache.nbytes}


def copied_per_chunk(side: str, chunk: int) -> int:
    """Bytes written besides the new tokens for one chunk of a long prompt."""
    return 0 if side == "ours" else (WINDOW - 1) * BYTES_PER_TOKEN


def main() -> None:
    rounds = rounds_from_command_line(__doc__)
    line: dict[str, Any] = {"benchmark": "ring", "device": str(mx.default_device())}
    for chunk in CHUNKS:
        sides = {
            "mlx-lm": lambda chunk=chunk: run(lambda _: stock.RotatingKVCache(WINDOW), chunk),
            "ours": lambda chunk=chunk: run(lambda most: RingKVCache(WINDOW, most, reserve=PROMPT), chunk),
        }
        got = {side: medians(runs) for side, runs in take_turns(rounds, sides).items()}
        print(f"window {WINDOW:,}, {PROMPT:,} tokens in chunks of {chunk:,}, then {DECODED:,} steps", file=sys.stderr)
        for side, m in got.items():
            print(
                f"  {side:<7} peak {m['peak'] / 1e6:6.1f} MB  prompt {m['prefill'] * 1e3:7.2f} ms  "
                f"decode update {m['update'] * 1e6:6.1f} us  with attention {m['step'] * 1e6:7.1f} us  "
                f"copied per chunk {copied_per_chunk(side, chunk) / 1e6:.1f} MB",
                file=sys.stderr,
            )
        stock_side, ours = got["mlx-lm"], got["ours"]
        line[f"chunk_{chunk}"] = {
            "peak_bytes_mlx_lm": int(stock_side["peak"]),
            "peak_bytes_ours": int(ours["peak"]),
            "peak_ours_of_mlx_lm": round(ours["peak"] / stock_side["peak"], 3),
            "least_bytes": (WINDOW + 2 * chunk - 1) * BYTES_PER_TOKEN,
            "prefill_ratio": round(stock_side["prefill"] / ours["prefill"], 3),
            "decode_update_ratio": round(stock_side["update"] / ours["update"], 3),
            "decode_step_ratio": round(stock_side["step"] / ours["step"], 3),
            "bytes_copied_per_chunk_mlx_lm": copied_per_chunk("mlx-lm", chunk),
            "bytes_copied_per_chunk_ours": copied_per_chunk("ours", chunk),
            "bytes_copied_per_decode_step": 0,
        }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
