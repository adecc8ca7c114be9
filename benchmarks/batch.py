"""What rows of different lengths cost: mlx-lm's left-padded batches against ours, in one process.

    python benchmarks/batch.py [--rounds 5]

The physics. A batch of 8 rows, 8 heads x 128, up to 8,192 tokens: 537 MB of keys and values in float32, a layer.

Taking back a different number of tokens in each row, as batched speculation does after every round: mlx-lm's batch is
aligned on the right, so it rolls every row of the whole buffer (prepare and finalize), reading and writing all of it
once. Ours is aligned on the left: rows change where they end, and nothing moves.

A decode step over 4 layers, rows of 6,400 to 8,192 tokens: both hand all slots up to the longest row and one mask to
attention; what differs is how the new tokens are written, one slice there, one scatter here. Attention reads 2.1 GB
either way, so the limit of the ratio is 1.

Then tokens per second of the reference model for 8 prompts of 12 to 400 tokens, 64 tokens each, with batches of 1, 4
and 8 rows: without a draft this is mlx-lm's BatchGenerator, over its own caches and over ours; with the bundled draft
it is our loop, 3 tokens drafted a round. Where few drafts are accepted, speculation loses: it says how many were.

Sides take turns; times are medians; ratios are mlx-lm / ours (more than 1: ours is faster), speculation's is against
our plain batches. One JSON line last.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import KVCache, SpeculationStatistics, batch_generate, model_path
from mlx_kv.mlxlm.loading import load

# isort: split
import mlx.core as mx
import mlx_lm.models.cache as stock
from common import medians, rounds_from_command_line, take_turns
from mlx_lm.generate import BatchGenerator

ROWS, HEADS, DIM, TOKENS, LAYERS = 8, 8, 128, 8_192, 4
LENGTHS = [TOKENS - 256 * row for row in range(ROWS)]
STEPS, GENERATED, DRAFTED = 8, 64, 3
SOURCE = "def read(path, *, encoding):\n    with open(path, encoding=encoding) as file:\n        return file.read()\n"


def random(*shape: int) -> mx.array:
    x = mx.random.normal(shape)
    mx.eval(x)
    return x


def theirs() -> stock.BatchKVCache:
    """A left-padded batch whose rows hold LENGTHS tokens."""
    cache = stock.BatchKVCache([TOKENS - length for length in LENGTHS])
    cache.update_and_fetch(random(ROWS, HEADS, TOKENS, DIM), random(ROWS, HEADS, TOKENS, DIM))
    mx.eval(cache.state)
    return cache


def ours() -> KVCache:
    """The same, aligned on the left."""
    cache = KVCache.merge([KVCache(reserve=TOKENS + 256) for _ in range(ROWS)])
    cache.prepare(lengths=LENGTHS, right_padding=[TOKENS - length for length in LENGTHS])
    for _ in range(0, TOKENS, 2048):
        cache.update_and_fetch(random(ROWS, HEADS, 2048, DIM), random(ROWS, HEADS, 2048, DIM))
        mx.eval(cache.state[:2])
    cache.finalize()
    return cache


def timed(work: Callable[[], Any]) -> dict[str, float]:
    started = time.perf_counter()
    work()
    mx.synchronize()
    return {"seconds": time.perf_counter() - started}


def measure_trims(rounds: int) -> dict[str, dict[str, float]]:
    padded, left = theirs(), ours()
    counts = [row % 4 for row in range(ROWS)]

    def roll() -> None:
        padded.prepare(right_padding=counts)
        padded.finalize()
        mx.eval(padded.state)

    def trim() -> None:
        left.trim_per_sequence(counts)

    sides = {"mlx-lm": lambda: timed(roll), "ours": lambda: timed(trim)}
    return {side: medians(runs) for side, runs in take_turns(rounds, sides).items()}


def decode(caches: list[Any], q: mx.array, k: mx.array, v: mx.array) -> None:
    for _ in range(STEPS):
        mask = caches[0].make_mask(1)
        for cache in caches:
            keys, values = cache.update_and_fetch(k, v)
            out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=DIM**-0.5, mask=mask)
            mx.eval(out)
            del keys, values


def measure_steps(rounds: int) -> dict[str, dict[str, float]]:
    q, k, v = random(ROWS, 2 * HEADS, 1, DIM), random(ROWS, HEADS, 1, DIM), random(ROWS, HEADS, 1, DIM)
    sides = {"mlx-lm": [theirs() for _ in range(LAYERS)], "ours": [ours() for _ in range(LAYERS)]}

    def once(caches: list[Any]) -> dict[str, float]:
        result = timed(lambda: decode(caches, q, k, v))
        for cache in caches:
            cache.trim(STEPS)
        return {"seconds": result["seconds"] / STEPS}

    runs = take_turns(rounds, {side: lambda caches=caches: once(caches) for side, caches in sides.items()})
    return {side: medians(each) for side, each in runs.items()}


def measure_text(rounds: int) -> dict[str, dict[str, float]]:
    model, tokenizer = load(model_path("reference"))
    draft, _ = load(model_path("draft"))
    prompts = [tokenizer.encode(SOURCE * (1 + 2 * row))[: 12 + 55 * row] for row in range(8)]

    def mlx_lm(rows: int) -> dict[str, float]:
        generator = BatchGenerator(model, max_tokens=GENERATED, completion_batch_size=rows, prefill_batch_size=rows)
        generator.insert(prompts)
        started, tokens = time.perf_counter(), 0
        while tokens < GENERATED * len(prompts):
            tokens += len(generator.next_generated())
        generator.close()
        return {"speed": tokens / (time.perf_counter() - started)}

    def plain(rows: int) -> dict[str, float]:
        started = time.perf_counter()
        tokens = sum(1 for _ in batch_generate(model, None, prompts, max_tokens=GENERATED, max_batch_size=rows))
        return {"speed": tokens / (time.perf_counter() - started)}

    def speculative(rows: int) -> dict[str, float]:
        counts, started = SpeculationStatistics(), time.perf_counter()
        options: dict[str, Any] = {"max_tokens": GENERATED, "max_batch_size": rows, "statistics": counts}
        tokens = sum(
            1 for _ in batch_generate(model, None, prompts, draft_model=draft, num_draft_tokens=DRAFTED, **options)
        )
        return {"speed": tokens / (time.perf_counter() - started), "accepted": counts.acceptance_rate}

    results = {}
    for rows in (1, 4, 8):
        sides = {"mlx-lm": mlx_lm, "ours": plain, "ours, speculative": speculative}
        runs = take_turns(rounds, {side: lambda run=run, rows=rows: run(rows) for side, run in sides.items()})
        results[rows] = {side: medians(each) for side, each in runs.items()}
        for side, got in results[rows].items():
            more = f"  {got['accepted']:.0%} of drafts accepted" if "accepted" in got else ""
            print(f"batch of {rows}, {side:<18} {got['speed']:9.1f} tokens/s{more}", file=sys.stderr)
    return results


def main() -> None:
    rounds = rounds_from_command_line(__doc__)
    line: dict[str, Any] = {"benchmark": "batch", "device": str(mx.default_device())}
    for name, measure, unit in (("trim", measure_trims, 1e6), ("step", measure_steps, 1e3)):
        got = {side: result["seconds"] for side, result in measure(rounds).items()}
        word = "us" if unit == 1e6 else "ms"
        for side, seconds in got.items():
            print(f"{name:<5} {side:<8} {seconds * unit:12.2f} {word}", file=sys.stderr)
            line[f"{name}_{word}_{side.replace('-', '_')}"] = round(seconds * unit, 3)
        line[f"{name}_ratio"] = round(got["mlx-lm"] / got["ours"], 3)
    for rows, result in measure_text(rounds).items():
        name = f"tokens_per_second_{rows}"
        line[f"{name}_mlx_lm"] = round(result["mlx-lm"]["speed"], 1)
        line[f"{name}_ours"] = round(result["ours"]["speed"], 1)
        line[f"{name}_speculative"] = round(result["ours, speculative"]["speed"], 1)
        line[f"ratio_{rows}"] = round(result["ours"]["speed"] / result["mlx-lm"]["speed"], 3)
        line[f"speculation_ratio_{rows}"] = round(result["ours, speculative"]["speed"] / result["ours"]["speed"], 3)
        line[f"acceptance_{rows}"] = round(result["ours, speculative"]["accepted"], 4)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
