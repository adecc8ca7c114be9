"""Decode with a budget: against a full cache, against the least that a budget can cost, and against VeloxQuant-MLX.

    python benchmarks/budget_decode.py [--model build/smollm2] [--rounds 3] [--context 8192] [--budget 1024]

The physics. A step of decode reads all weights, and all keys and values that are held: with a budget the latter no
longer grow. The limit is a plain cache of as many tokens, which nobody compacts: it holds the budget, and is taken back
to it when it has the margin more. Ours must also decide what goes and move it, every margin tokens; rounds are exactly
as long, so that each has one compaction. A full cache of mlx-lm reads everything.

VeloxQuant-MLX 0.94.15 (Python package of this name) has eviction, too: `knorm` by key norms, `snapkv` and `h2o` by
attention of keys that stand for queries. Where it is not installed it is left out, in one line. Its caches store
float16, ours what the model has, so bytes of float32 models are twice theirs for as many tokens.

Caches are filled with random keys and values, in chunks of 512 tokens, no prompt is read: what lies in a cache does not
change what a step costs. (Those of VeloxQuant-MLX get the budget and one chunk more, as they evict token by token: what
they hold is the same then.) Measured on a llama of 8 layers that is made here, 4,096 tokens and a budget of 512, and on
a checkpoint, if one is given. All sides in one process, in turns; medians of rounds. One JSON line last.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections.abc import Callable
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import CachePolicy, compact, make_prompt_cache
from mlx_kv.mlxlm.loading import load

# isort: split
import mlx.core as mx
from common import medians, take_turns
from mlx.utils import tree_flatten
from mlx_lm.models import cache as stock
from mlx_lm.models import llama

CHUNK = 512
SMALL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 8192,
}
SCORES = ("key_diff", "key_norm", "snap_kv")
METHODS = {"knorm": "knorm_budget", "snapkv": "snap_budget", "h2o": "h2o_budget"}


def fill(model: Any, caches: list[Any], tokens: int) -> list[Any]:
    """Random keys and values of so many tokens in every layer."""
    args = model.args
    shape = args.num_key_value_heads, args.head_dim or args.hidden_size // args.num_attention_heads
    for start in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - start)
        for layer, cache in enumerate(caches):
            both = mx.random.normal((2, 1, shape[0], count, shape[1]), key=mx.random.key(start + layer))
            cache.update_and_fetch(both[0], both[1])
        mx.eval([cache.state for cache in caches])
    return caches


def held(caches: list[Any]) -> int:
    """Bytes of all arrays that caches hold."""
    return sum(x.nbytes for _, x in tree_flatten([cache.state for cache in caches]) if isinstance(x, mx.array))


def decoded(model: Any, caches: list[Any], steps: int, after: Callable[[], None]) -> Callable[[], dict[str, float]]:
    def run() -> dict[str, float]:
        token = mx.array([[1]])
        mx.eval(model(token, cache=caches))  # what was put off until now is no part of a step
        started = time.perf_counter()
        for _ in range(steps):
            token = mx.argmax(model(token, cache=caches)[:, -1:], axis=-1)
            mx.eval(token)
        seconds = (time.perf_counter() - started) / steps
        after()
        return {"milliseconds": 1e3 * seconds, "megabytes": held(caches) / 1e6}

    return run


def velox_sides(model: Any, budget: int) -> dict[str, list[Any]]:
    """Caches of VeloxQuant-MLX; none where it is not there."""
    try:
        from veloxquant_mlx import KVCacheBuilder, KVCacheConfig

        version = importlib.metadata.version("VeloxQuant-MLX")
    except ImportError:
        print("VeloxQuant-MLX is not installed: left out (pip install VeloxQuant-MLX==0.94.15)")
        return {}
    args, sides, tokens = model.args, {}, budget + CHUNK
    dim = args.head_dim or args.hidden_size // args.num_attention_heads
    for method, option in METHODS.items():
        config = KVCacheConfig(method=method, head_dim=dim, **{option: budget})
        started = time.perf_counter()
        sides[f"VeloxQuant {version} {method}"] = fill(model, KVCacheBuilder.for_model(model, config), tokens)
        print(f"  VeloxQuant {method}: filled in {time.perf_counter() - started:.0f} s", flush=True)
    return sides


def measure(name: str, model: Any, context: int, budget: int, rounds: int) -> dict[str, Any]:
    print(f"{name}: {context:,} tokens, a budget of {budget:,}", flush=True)
    policies = {score: CachePolicy(budget=budget, score=score) for score in SCORES}
    slack = policies["key_diff"].layout().slack  # type: ignore[union-attr]
    steps = slack  # and the one before the clock starts
    plain = fill(model, make_prompt_cache(model), budget)
    full = fill(model, stock.make_prompt_cache(model), context)

    def back() -> None:
        for cache in plain:
            cache.trim(steps + 1)

    sides = {
        "mlx-lm, all tokens": decoded(model, full, steps, lambda: None),
        "the limit": decoded(model, plain, steps, back),
    }
    for score, policy in policies.items():
        ours = fill(model, make_prompt_cache(model, policy), context)
        compact(ours)
        sides[f"ours {score}"] = decoded(model, ours, steps, lambda: None)
    for side, caches in velox_sides(model, budget).items():
        sides[side] = decoded(model, caches, steps, lambda: None)
    found = {side: medians(runs) for side, runs in take_turns(rounds, sides).items()}
    limit, everything = (found[side]["milliseconds"] for side in ("the limit", "mlx-lm, all tokens"))
    for side, own in found.items():
        print(
            f"  {side:28} {own['milliseconds']:7.1f} ms a token, {1e3 / own['milliseconds']:6.1f} tokens/s, "
            f"{own['megabytes']:7.1f} MB; {everything / own['milliseconds']:5.2f} times as fast as all tokens, "
            f"{own['milliseconds'] / limit - 1:+.1%} of the limit",
            flush=True,
        )
    return {"context": context, "budget": budget, "steps": steps, "sides": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint of mlx-lm; without one, the llama of 8 layers alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, default=8192, help="tokens before the first step")
    parser.add_argument("--budget", type=int, default=1024)
    given = parser.parse_args()
    mx.random.seed(0)
    small = llama.Model(llama.ModelArgs.from_dict(SMALL))
    mx.eval(small.parameters())
    results = {"llama of 8 layers": measure("llama of 8 layers", small, 4096, 512, given.rounds)}
    del small
    if given.model is not None:
        model, _ = load(given.model)
        name = given.model.rstrip("/").rpartition("/")[2]
        results[name] = measure(name, model, given.context, given.budget, given.rounds)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
