"""What an eviction costs: a textbook gather of all survivors against our hole filling, both in one process.

    python benchmarks/compaction.py [--rounds 5]

The physics. 36 layers of 8 heads x 128 in float16, 4,096 bytes per token and layer, sinks 4, the newest 64 protected,
scores by key norm, summed over layers. One shot: 8,192 tokens are cut to 4,096 at once. Steady state: with a margin of
64, 4,161 tokens are cut to 4,096, which happens every 65 tokens for the rest of a generation.

To be contiguous again, each survivor beyond the new end must move: no method can move fewer. The textbook scores all
tokens and gathers all 4,096 survivors of each layer into new arrays, however few go: with take_along_axis, the usual
way, or with one index for all heads, the fastest that MLX has; both are measured. Ours scores the tokens that are new,
moves survivors from behind the cut into the holes before it, and slides the recent block: at most as many slots as are
evicted, and 64. It evaluates what it read before it writes, or MLX would copy the whole buffer.

Peak memory is what a compaction takes beyond the caches, bytes are counted from shapes, read and written once each. It
is also measured where a cache is small beside one of its layers: 12 layers, 4,160 tokens cut to 4,096, for the first
time and again, by scores that see all tokens or the new ones, whoever decides, plain and in 8 bits.

Then decode: tokens per second of the reference model after 16,384 tokens, all kept against a budget of 1,024. Attention
reads 18 times the bytes; what is left are the weights. And what a budget costs: one of 512 against a plain cache that
holds 512 tokens and is taken back to them after every 64, which is when the budget compacts: the whole model, and the
attention step of one layer alone. Both read 512 to 576 tokens. Ratios are textbook / ours and budget / full or plain:
more than 1, ours is faster. One JSON line last.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import CachePolicy, KVCache, compact, make_prompt_cache, model_path
from mlx_kv.cache.eviction.evictor import LayerGroup
from mlx_kv.mlxlm.loading import load

# isort: split
import mlx.core as mx
from common import medians, rounds_from_command_line, take_turns
from mlx_lm.generate import generate_step

LAYERS, HEADS, DIM = 36, 8, 128
LONG, BUDGET, MARGIN, SINKS, RECENT = 8_192, 4_096, 64, 4, 64
CONTEXT, DECODE_BUDGET, DECODED = 16_384, 1_024, 128
FEW_LAYERS, SMALL_BUDGET, STEPS = 12, 512, 64
PEAKS: dict[str, dict[str, Any]] = {
    "key_norm": {"score": "key_norm"},
    "key_diff": {"score": "key_diff"},
    "key_diff, each layer": {"score": "key_diff", "share": "layer"},
    "key_norm, each head": {"score": "key_norm", "share": "head"},
    "key_norm, 8 bits": {"score": "key_norm", "bits": 8},
    "key_diff, 8 bits": {"score": "key_diff", "bits": 8},
}
SLOT = 2 * HEADS * DIM * 2  # bytes, keys and values
POLICY = CachePolicy(budget=BUDGET, margin=MARGIN, sinks=SINKS, keep_recent=RECENT, score="key_norm", max_write=LONG)

Pair = tuple[mx.array, mx.array]


def tokens(count: int, seed: int) -> list[Pair]:
    """Keys and values of every layer, (1, H, count, D). Norms spread as they do in a model, not all alike."""
    made = []
    for layer in range(LAYERS):
        keys = [mx.random.key(1000 * seed + 10 * layer + i) for i in range(3)]
        scale = mx.exp(0.3 * mx.random.normal((1, HEADS, count, 1), key=keys[0]))
        k, v = (mx.random.normal((1, HEADS, count, DIM), key=key) for key in keys[1:])
        made.append(((k * scale).astype(mx.float16), v.astype(mx.float16)))
        mx.eval(made[-1])
    return made


def measured(work: Callable[[], Any]) -> dict[str, float]:
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    started = time.perf_counter()
    work()
    mx.synchronize()
    return {"seconds": time.perf_counter() - started, "peak": mx.get_peak_memory() - before}


def textbook(
    layers: Sequence[Sequence[mx.array]], gather: Callable[[mx.array, mx.array], mx.array]
) -> dict[str, float]:
    """Scores all tokens, keeps the best, gathers them: the caches of each layer are replaced one after the other."""
    held = [*layers]

    def work() -> None:
        n = held[0][0].shape[2]
        total = mx.zeros((n - SINKS - RECENT,))
        for keys, _ in held:
            norms = -mx.linalg.norm(keys.astype(mx.float32), axis=-1).mean(axis=(0, 1))[SINKS : n - RECENT]
            total = total + (norms - norms.mean()) / norms.std()
            mx.eval(total)
        best = mx.argpartition(-total, BUDGET - SINKS - RECENT)[: BUDGET - SINKS - RECENT] + SINKS
        index = mx.concatenate([mx.arange(SINKS), mx.sort(best), mx.arange(n - RECENT, n)])
        for layer, pair in enumerate(held):
            held[layer] = gather(pair[0], index), gather(pair[1], index)
            mx.eval(held[layer])

    return measured(work)


def per_head(x: mx.array, index: mx.array) -> mx.array:
    return mx.take_along_axis(x, mx.broadcast_to(index[None, None, :, None], (1, HEADS, index.size, DIM)), axis=2)


def one_index(x: mx.array, index: mx.array) -> mx.array:
    return x[:, :, index]


def caches(policy: CachePolicy = POLICY, layers: int = LAYERS) -> list[KVCache]:
    layer_group = LayerGroup()
    return [policy.make_cache(layer_group=layer_group, layer=layer) for layer in range(layers)]


def fill(held: list[KVCache], layers: Sequence[Sequence[mx.array]]) -> None:
    """Writes tokens, in two halves where they are many: one write of all slots would only borrow the array."""
    for cache, pair in zip(held, layers, strict=True):
        for first in range(0, pair[0].shape[2], LONG // 2):
            cache.update_and_fetch(*(x[:, :, first : first + LONG // 2] for x in pair))
            mx.eval(cache.state)


def evictions(held: list[KVCache]) -> dict[str, float]:
    """Compacts, and counts what moved and what the least would have been: survivors that lay beyond the new end."""
    before, end = held[0].evictor.metadata.work[0].moved, held[0].size()
    old = held[0].positions[0, 0, BUDGET:].tolist()
    got = measured(lambda: compact(held))
    kept = set(held[0].positions[0, 0].tolist())
    assert held[0].size() == BUDGET < end
    return got | {
        "moved": held[0].evictor.metadata.work[0].moved - before,
        "least": sum(position in kept for position in old),
    }


def measure(rounds: int) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, float]]:
    long, more = tokens(LONG, 0), tokens(MARGIN + 1, 1)
    results, shares = {}, peaks(long, more)

    def one_shot() -> dict[str, float]:
        held = caches()
        fill(held, long)
        return evictions(held)

    sides: dict[str, Callable[[], Any]] = {
        "textbook": lambda: textbook(long, per_head),
        "textbook, one index": lambda: textbook(long, one_index),
        "ours": one_shot,
    }
    results["one shot"] = {side: medians(runs) for side, runs in take_turns(rounds, sides).items()}
    steady = caches()
    fill(steady, [(k[:, :, :BUDGET], v[:, :, :BUDGET]) for k, v in long])
    slightly = [tuple(mx.contiguous(x[:, :, : BUDGET + MARGIN + 1]) for x in pair) for pair in long]
    mx.eval(slightly)
    long.clear()

    def one_more() -> dict[str, float]:
        fill(steady, more)
        return evictions(steady)

    sides = {
        "textbook": lambda: textbook(slightly, per_head),
        "textbook, one index": lambda: textbook(slightly, one_index),
        "ours": one_more,
    }
    results["steady state"] = {side: medians(runs) for side, runs in take_turns(rounds, sides).items()}
    for case, result in results.items():
        print(case, file=sys.stderr)
        for side, got in result.items():
            print(
                f"  {side:<20} {got['seconds'] * 1e3:9.1f} ms  {got['peak'] / 1e6:8.1f} MB more at the peak",
                file=sys.stderr,
            )
    return results, shares


def peaks(long: list[Pair], more: list[Pair]) -> dict[str, float]:
    """What a compaction of few layers takes at the peak, of what is live: the first, or a later one that takes more."""
    shares = {}
    for name, settings in PEAKS.items():
        held, most = caches(replace(POLICY, **settings), FEW_LAYERS), 0.0
        fill(held, [(k[:, :, : BUDGET - 1], v[:, :, : BUDGET - 1]) for k, v in long[:FEW_LAYERS]])
        for _ in range(2):
            fill(held, more[:FEW_LAYERS])
            live = sum(cache.nbytes_live for cache in held)
            most = max(most, measured(lambda held=held: compact(held))["peak"] / live)
        shares[name] = most
        print(f"{FEW_LAYERS} layers, {name:<22} {most:6.2%} of the cache more at the peak", file=sys.stderr)
    return shares


def measure_small(rounds: int) -> dict[str, float]:
    """Plain / budget, seconds of a step: of the whole reference model, and of one layer's update and attention."""
    model, _ = load(model_path("reference"))
    prompt = mx.random.randint(1, 4096, (1, 2 * SMALL_BUDGET), key=mx.random.key(0))
    policies = {"plain": CachePolicy(), "budget": CachePolicy(budget=SMALL_BUDGET, margin=STEPS)}
    models = {name: make_prompt_cache(model, policy) for name, policy in policies.items()}
    layers = {name: caches(policy, 1) for name, policy in policies.items()}
    q, k, v = (mx.random.normal((1, HEADS, 2 * SMALL_BUDGET, DIM)).astype(mx.float16) for _ in range(3))

    def attend(cache: KVCache, first: int, last: int) -> None:
        mask = cache.make_mask(last - first)
        keys, values = cache.update_and_fetch(k[:, :, first:last], v[:, :, first:last])
        mx.eval(mx.fast.scaled_dot_product_attention(q[:, :, first:last], keys, values, scale=1.0, mask=mask))

    def read(name: str, tokens: int) -> None:
        for first in range(0, tokens, SMALL_BUDGET):
            model(prompt[:, first : first + SMALL_BUDGET], cache=models[name])
            mx.eval([cache.state for cache in models[name]])
            attend(layers[name][0], first, first + SMALL_BUDGET)

    def once(held: list[KVCache], step: Callable[[int], None]) -> dict[str, float]:
        if held[0].size() > SMALL_BUDGET and held[0].evictor is None:
            for cache in held:
                cache.trim(cache.size() - SMALL_BUDGET)
        started = time.perf_counter()
        for number in range(STEPS):
            step(number)
        return {"seconds": (time.perf_counter() - started) / STEPS}

    def whole(name: str) -> dict[str, float]:
        return once(models[name], lambda i: mx.eval(model(prompt[:, i : i + 1], cache=models[name])))

    def attention(name: str) -> dict[str, float]:
        return once(layers[name], lambda i: attend(layers[name][0], i, i + 1))

    read("plain", SMALL_BUDGET)
    read("budget", 2 * SMALL_BUDGET)
    ratios = {}
    for what, run in (("model", whole), ("attention", attention)):
        runs = take_turns(8 * rounds, {name: lambda name=name, run=run: run(name) for name in policies})
        got = {name: medians(each)["seconds"] for name, each in runs.items()}
        ratios[what] = got["plain"] / got["budget"]
        print(
            f"a step at {SMALL_BUDGET} tokens, {what:<9} plain {got['plain'] * 1e3:7.3f} ms, budget "
            f"{got['budget'] * 1e3:7.3f} ms: {ratios[what]:.3f}",
            file=sys.stderr,
        )
    return ratios


def measure_decode(rounds: int) -> dict[str, float]:
    model, _ = load(model_path("reference"))
    prompt = mx.random.randint(1, 4096, (CONTEXT,), key=mx.random.key(0))
    policies = {"full": CachePolicy(), "budget": CachePolicy(budget=DECODE_BUDGET)}
    held = {name: make_prompt_cache(model, policy) for name, policy in policies.items()}
    for side in held.values():
        for first in range(0, CONTEXT, 512):
            model(prompt[None, first : first + 512], cache=side)
            mx.eval([cache.state for cache in side])

    def once(side: list[Any]) -> float:
        steps = generate_step(prompt[-1:], model, max_tokens=DECODED, prompt_cache=side)
        next(steps)
        started = time.perf_counter()
        return sum(1 for _ in steps) / (time.perf_counter() - started)

    runs = take_turns(rounds, {name: lambda side=side: {"speed": once(side)} for name, side in held.items()})
    speeds = {name: medians(each)["speed"] for name, each in runs.items()}
    for name, speed in speeds.items():
        print(f"decode after {CONTEXT:,} tokens, {name:<7} {speed:8.1f} tokens/s", file=sys.stderr)
    return speeds


def summary(
    results: dict[str, dict[str, dict[str, float]]],
    shares: dict[str, float],
    small: dict[str, float],
    speeds: dict[str, float],
) -> dict[str, Any]:
    line: dict[str, Any] = {"benchmark": "compaction", "device": str(mx.default_device())}
    held = {"one shot": LONG, "steady state": BUDGET + MARGIN + 1}
    for case, result in results.items():
        name, ours = case.replace(" ", "_"), result["ours"]
        cache = held[case] * SLOT * LAYERS
        for side, got in result.items():
            line[f"{name}_ms_{side.replace(', ', '_').replace(' ', '_')}"] = round(got["seconds"] * 1e3, 2)
        line[f"{name}_ratio"] = round(result["textbook"]["seconds"] / ours["seconds"], 2)
        line[f"{name}_ratio_one_index"] = round(result["textbook, one index"]["seconds"] / ours["seconds"], 2)
        line[f"{name}_extra_peak_of_cache"] = round(ours["peak"] / cache, 4)
        line[f"{name}_extra_peak_of_cache_textbook"] = round(result["textbook"]["peak"] / cache, 4)
        line[f"{name}_mb_moved"] = round(2 * ours["moved"] * SLOT * LAYERS / 1e6, 2)
        line[f"{name}_mb_moved_least"] = round(2 * ours["least"] * SLOT * LAYERS / 1e6, 2)
        line[f"{name}_mb_moved_textbook"] = round(2 * BUDGET * SLOT * LAYERS / 1e6, 2)
    for name, share in shares.items():
        line[f"extra_peak_of_12_layers_{name.replace(', ', '_').replace(' ', '_')}"] = round(share, 4)
    for name, ratio in small.items():
        line[f"budget_of_512_over_plain_{name}"] = round(ratio, 3)
    line["decode_tokens_per_second_full"] = round(speeds["full"], 1)
    line["decode_tokens_per_second_budget"] = round(speeds["budget"], 1)
    line["decode_ratio"] = round(speeds["budget"] / speeds["full"], 2)
    return line


def main() -> None:
    rounds = rounds_from_command_line(__doc__)
    print(json.dumps(summary(*measure(rounds), measure_small(rounds), measure_decode(rounds))))


if __name__ == "__main__":
    main()
