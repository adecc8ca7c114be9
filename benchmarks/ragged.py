"""One long row among fifteen short ones: what a batch allocates, and what a decode step of it takes.

    python benchmarks/ragged.py [--rounds 5]

A batch of one buffer has as many slots for each row as the longest needs, and attention reads them, masked: 16 x 32,000
for 39,500 tokens that are live. Kept by class, rows are read in two calls, and each class has slots of its own number.
The least that this could cost is what two batches of alike rows cost one after the other: the same bytes are read, but
the weights of a model are read twice, and so is everything else that a step costs, whatever its rows.

attention: one layer of 2 KV heads and 4 query heads of 64 dims, float32, 16 rows.
model:     the bundled reference model in the engine of `batch_generate`, with a quarter of the tokens: 8,000, and 125
           in each of fifteen rows. Prompts are not read: caches bring random keys and values. What is timed is
           decoding, with all rows; the two batches decode one after the other.
Medians of steps, and of rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import mlx_kv  # before MLX: it loads a tuned BLAS

# isort: split
import mlx.core as mx
from common import medians, rounds_from_command_line, take_turns
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_kv import KVCache, cache_statistics, load
from mlx_kv.bundled import model_path
from mlx_kv.cache.segmented import SegmentedCache
from mlx_kv.generation.engine import EngineSettings, make_engine
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.mlxlm import batching
from mlx_kv.mlxlm.attention import AttentionCall

HEADS, DIM = 2, 64
LONG, SHORT, ROWS = 32_000, 500, 16
STEPS = 16
SMALLER = 4  # of the reference model, which has four layers
GENERATED = 32


def filled(tokens: int) -> KVCache:
    cache = KVCache()
    cache.reserve(tokens + 256)
    cache.update_and_fetch(*(mx.random.normal((1, HEADS, tokens, DIM)) for _ in range(2)))
    mx.eval(cache.state)
    return cache


def step(cache: Any, tokens: tuple[mx.array, mx.array, mx.array]) -> mx.array:
    """One decode step of one layer, as a model asks for it."""
    queries, keys, values = tokens
    named = {"cache": cache, "scale": DIM**-0.5, "mask": cache.make_mask(1)}
    read = cache.update_and_fetch(keys, values)
    hook = getattr(cache, "attention_hook", None)
    if hook is None:
        return scaled_dot_product_attention(queries, *read, **named)
    return hook.attend(AttentionCall(scaled_dot_product_attention, (queries, *read), named))  # type: ignore[no-any-return]


def median_seconds(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure_attention(rounds: int) -> dict[str, dict[str, float]]:
    rows = [filled(LONG if row == ROWS // 2 else SHORT) for row in range(ROWS)]
    by_length = [[row for row in rows if (row.size() == LONG) is long] for long in (True, False)]
    batches = {
        "one buffer": [KVCache.merge(rows)],
        "by class": [SegmentedCache.merge([SegmentedCache(row) for row in rows])],
        "two batches": [KVCache.merge(alike) for alike in by_length],
    }
    del rows, by_length
    mx.eval([cache.state for caches in batches.values() for cache in caches])
    tokens = {
        count: tuple(mx.random.normal((count, heads, 1, DIM)) for heads in (2 * HEADS, HEADS, HEADS))
        for count in (1, ROWS - 1, ROWS)
    }
    mx.eval(tokens)

    def once(caches: list[Any]) -> dict[str, float]:
        counts = [1, ROWS - 1] if len(caches) == 2 else [ROWS]

        def run() -> None:
            for cache, count in zip(caches, counts, strict=True):
                mx.eval(step(cache, tokens[count]))

        seconds = median_seconds(run)
        allocated, live = (sum(getattr(cache, name) for cache in caches) for name in ("nbytes", "nbytes_live"))
        for cache in caches:
            cache.trim(STEPS)
        return {"seconds": seconds, "bytes_over_live": allocated / live}

    runs = take_turns(rounds, {side: lambda caches=caches: once(caches) for side, caches in batches.items()})
    return {side: medians(each) for side, each in runs.items()}


def stored_keys(model: Any) -> mx.array:
    """The keys that the first layer of a model stores of one token."""
    caches = mlx_kv.make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    keys: mx.array = caches[0].keys
    return keys


def measure_model(rounds: int) -> dict[str, dict[str, float]]:
    model, _ = load(model_path("reference"))
    lengths = [(LONG if row == ROWS // 2 else SHORT) // SMALLER for row in range(ROWS)]
    alike = [[length for length in lengths if (length > SHORT) is long] for long in (True, False)]
    one = stored_keys(model)
    heads, dim = one.shape[1], one.shape[3]

    def brought(engine: Any, length: int) -> list[Any]:
        caches = engine.make_caches()
        for cache in caches:
            cache.reserve(length + GENERATED)
            cache.update_and_fetch(*(mx.random.normal((1, heads, length, dim), one.dtype) for _ in range(2)))
        mx.eval([cache.state for cache in caches])
        return caches  # type: ignore[no-any-return]

    def decoded(batch: list[int]) -> tuple[float, int, int]:
        """Seconds of a step in which all rows decode, and bytes after them: allocated, live."""
        engine = make_engine(model, set(), None, EngineSettings(ROWS))
        for index, length in enumerate(batch):
            engine.submit(TokenSequence(index, [1], GENERATED, caches=brought(engine, length)))
        while engine.pending:
            engine.step()
        seconds = median_seconds(engine.step)
        held = cache_statistics(engine.caches)
        engine.close()
        return seconds, held.bytes_allocated, held.bytes_live

    def once(batches: list[list[int]], classes: bool) -> dict[str, float]:
        asked, batching.attends_by_class = batching.attends_by_class, asked_of(classes)
        try:
            each = [decoded(batch) for batch in batches]
        finally:
            batching.attends_by_class = asked
        seconds, allocated, live = (sum(one[i] for one in each) for i in range(3))
        return {"seconds": seconds, "bytes_over_live": allocated / live}

    def asked_of(classes: bool) -> Any:
        genuine = batching.attends_by_class
        return lambda model: classes and genuine(model)

    sides = {
        "one buffer": lambda: once([lengths], False),
        "by class": lambda: once([lengths], True),
        "two batches": lambda: once(alike, False),
    }
    return {side: medians(each) for side, each in take_turns(rounds, sides).items()}


def main() -> None:
    rounds = rounds_from_command_line(__doc__)
    line: dict[str, Any] = {"benchmark": "ragged", "device": str(mx.default_device())}
    for name, measure in (("attention", measure_attention), ("model", measure_model)):
        got = measure(rounds)
        for side, result in got.items():
            seconds, bytes_over_live = result["seconds"], result["bytes_over_live"]
            told = f"{seconds * 1e3:10.2f} ms a step, allocated {bytes_over_live:6.2f} times what is live"
            print(f"{name:<10} {side:<12} {told}", file=sys.stderr)
            word = side.replace(" ", "_")
            line[f"{name}_ms_{word}"] = round(seconds * 1e3, 3)
            line[f"{name}_bytes_over_live_{word}"] = round(bytes_over_live, 3)
        for other in ("one buffer", "two batches"):
            ratio = got[other]["seconds"] / got["by class"]["seconds"]
            line[f"{name}_ratio_to_{other.replace(' ', '_')}"] = round(ratio, 3)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
