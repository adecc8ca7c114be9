"""Rows that share their first tokens: a decode step and its bytes, against rows with whole copies; and a first token.

    python benchmarks/shared_prefix.py [--model DIR] [--grid 1x500,16x2000] [--turns 8] [--budget 4096]

decode:  an engine with R rows that share a prefix of P tokens, and one whose rows have whole copies, in turns. The
         shared tokens are random keys and values in a `PromptMemory`, of which each row is a hit. The least that is
         possible: one prefix, and the tokens of each row behind it. Cells whose copies would need more than `--most-gb`
         are measured with segments alone. With `--budget` rows evict what exceeds it.
prompts: `batch_generate` with 16 prompts that share 3,000 tokens (the bundled reference model), under several policies:
         seconds to the first token of all prompts, and the peak of MLX's memory, against the same without sharing.
Medians of turns. One JSON line last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import mlx_kv  # before MLX: it loads a tuned BLAS

# isort: split
import mlx.core as mx

from mlx_kv import CachePolicy, PromptMemory, batch_generate, load
from mlx_kv.bundled import model_path
from mlx_kv.cache import row_classes
from mlx_kv.generation.admission import Beginnings
from mlx_kv.generation.engine import Engine, EngineSettings, make_engine
from mlx_kv.generation.sequence import TokenSequence

GRID = "1x500,4x500,16x500,64x500,1x2000,4x2000,16x2000,64x2000,1x8000,4x8000,16x8000,64x8000"
OWN, ANSWER = 16, 48  # tokens of each row: of its prompt, and room for its answer
TURN = 4  # decode steps of a turn
PROMPTS, COMMON = 16, 3000
POLICIES = {
    "full": CachePolicy(),
    "residual": CachePolicy(bits=8, residual_length=128),
    "budget": CachePolicy(budget=4096),  # nothing is evicted
    "evicting": CachePolicy(budget=1024),
    "window": CachePolicy(max_kv_size=1024),
}


@contextlib.contextmanager
def without_sharing() -> Iterator[None]:
    """Batches that are made here keep whole copies of shared tokens."""
    least, common = row_classes.min_saving, Beginnings.common
    row_classes.min_saving = lambda: 2**62
    Beginnings.common = lambda *_: 0  # type: ignore[method-assign]
    try:
        yield
    finally:
        row_classes.min_saving, Beginnings.common = least, common  # type: ignore[method-assign]


def kept_prefix(model: Any, policy: CachePolicy, tokens: list[int]) -> PromptMemory:
    """A memory that keeps random keys and values of these tokens."""
    caches = mlx_kv.make_prompt_cache(model, policy)
    model(mx.array([[0]]), cache=caches)
    for cache in caches:
        heads, dims, dtype = cache.keys.shape[1], (cache.keys.shape[3], cache.values.shape[3]), cache.keys.dtype
        cache.trim(1)
        cache.update_and_fetch(*(mx.random.normal((1, heads, len(tokens), dim), dtype) for dim in dims))
    memory = PromptMemory(2**40, fingerprint="all")
    memory.keep(tokens, caches)
    return memory


def filled(model: Any, policy: CachePolicy, memory: PromptMemory, tokens: list[int], rows: int) -> Engine:
    """An engine whose rows all decode."""
    engine = make_engine(model, set(), policy, EngineSettings(rows))
    for row in range(rows):
        own = mx.random.randint(1, 1000, (OWN,), key=mx.random.key(row)).tolist()
        found = memory.find([*tokens, *own])  # type: ignore[misc]
        assert found is not None
        caches, read = found
        engine.submit(TokenSequence(row, own, ANSWER, caches=caches, before=tokens[:read]))  # type: ignore[arg-type]
    while engine.pending:
        engine.step()
    return engine


def held(engine: Engine) -> int:
    return sum(cache.nbytes for cache in engine.caches)


def measure_decode(
    model: Any, policy: CachePolicy, rows: int, prefix: int, turns: int, most_bytes: float
) -> dict[str, Any]:
    tokens: list[int] = mx.random.randint(1, 1000, (prefix,), key=mx.random.key(0)).tolist()  # type: ignore[assignment]
    memory = kept_prefix(model, policy, tokens)
    per_token = memory.nbytes / prefix
    limit = per_token * (prefix + rows * (OWN + ANSWER))
    engines = {"segments": filled(model, policy, memory, tokens, rows)}
    if rows * prefix * per_token < most_bytes:
        with without_sharing():
            engines["copies"] = filled(model, policy, memory, tokens, rows)
    seconds: dict[str, list[float]] = {side: [] for side in engines}
    for turn in range(1 + turns):
        for side in list(engines)[:: 1 if turn % 2 else -1]:
            started = time.perf_counter()
            for _ in range(TURN):
                engines[side].step()
            mx.synchronize()  # an engine begins its next step before it returns, which would count for the other side
            if turn > 0:
                seconds[side].append((time.perf_counter() - started) / TURN)
    result: dict[str, Any] = {"rows": rows, "prefix": prefix, "bytes_limit": round(limit)}
    for side, engine in engines.items():
        result[f"ms_{side}"] = round(statistics.median(seconds[side]) * 1e3, 2)
        result[f"bytes_{side}"] = held(engine)
        engine.close()
    result["bytes_over_limit"] = round(result["bytes_segments"] / limit, 3)
    if "copies" in engines:
        pairs = zip(seconds["segments"], seconds["copies"], strict=True)
        result["step_ratio"] = round(statistics.median(shared / copies for shared, copies in pairs), 3)
        result["bytes_ratio"] = round(result["bytes_segments"] / result["bytes_copies"], 3)
    return result


def measure_prompts(model: Any, policy: CachePolicy, rounds: int) -> dict[str, float]:
    common: list[int] = mx.random.randint(1, 300, (COMMON,), key=mx.random.key(0)).tolist()  # type: ignore[assignment]
    prompts = [[*common, *range(1 + i, 9 + i)] for i in range(PROMPTS)]

    def first_tokens() -> tuple[float, float]:
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        started = time.perf_counter()
        seen: set[int] = set()
        for token in batch_generate(model, None, prompts, policy, 4):
            seen.add(token.index)
            if len(seen) == PROMPTS:
                break
        return time.perf_counter() - started, mx.get_peak_memory() - before

    sides: dict[str, list[tuple[float, float]]] = {"segments": [], "copies": []}
    for _ in range(rounds):
        sides["segments"].append(first_tokens())
        with without_sharing():
            sides["copies"].append(first_tokens())
    shared, copies = ([statistics.median(values) for values in zip(*runs, strict=True)] for runs in sides.values())
    return {
        "first_token_s_segments": round(shared[0], 2),
        "first_token_s_copies": round(copies[0], 2),
        "first_token_ratio": round(shared[0] / copies[0], 3),
        "peak_mb_segments": round(shared[1] / 1e6, 1),
        "peak_mb_copies": round(copies[1] / 1e6, 1),
        "peak_ratio": round(shared[1] / copies[1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference", help="a path, or the name of a bundled model")
    parser.add_argument("--grid", default=GRID, help="ROWSxPREFIX, separated by commas")
    parser.add_argument("--turns", type=int, default=8, help=f"timed turns of each side, each {TURN} decode steps")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of the prompts")
    parser.add_argument("--most-gb", type=float, default=7, help="largest batch of copies that is measured")
    parser.add_argument("--budget", type=int, help="tokens to keep of each row, in the decode part")
    parser.add_argument("--policies", default=",".join(POLICIES), help="of the prompts part, separated by commas")
    parser.add_argument("--part", choices=["decode", "prompts", "both"], default="both")
    arguments = parser.parse_args()
    line: dict[str, Any] = {"benchmark": "shared_prefix", "device": str(mx.default_device()), "model": arguments.model}
    if arguments.part != "prompts":
        model, _ = load(model_path(arguments.model))
        policy = CachePolicy(budget=arguments.budget)
        for cell in arguments.grid.split(","):
            rows, prefix = map(int, cell.split("x"))
            result = measure_decode(model, policy, rows, prefix, arguments.turns, arguments.most_gb * 1e9)
            line[f"decode_{cell}"] = result
            copies = f", copies {result['ms_copies']:8.1f} ms" if "ms_copies" in result else ""
            print(
                f"{rows:3} rows, {prefix:5,} shared: {result['ms_segments']:8.1f} ms a step{copies}; "
                f"{result['bytes_segments'] / 1e6:8.1f} MB, {result['bytes_over_limit']:.2f} of the least",
                file=sys.stderr,
            )
    if arguments.part != "decode":
        model, _ = load(model_path("reference"))
        for name in arguments.policies.split(","):
            line[f"prompts_{name}"] = result = measure_prompts(model, POLICIES[name], arguments.rounds)
            print(f"{PROMPTS} prompts, {COMMON:,} in common, {name}: {result}", file=sys.stderr)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
