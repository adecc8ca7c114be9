"""Heads of unequal lengths in groups, against one buffer as long as the longest head, and against a plain cache.

    python benchmarks/head_groups.py --model build/smollm2 [--context 2048] [--budget 512] [--steps 120]

The physics. Decoding reads keys and values of all slots. In one buffer each head of a layer has as many slots as the
longest, and a mask hides the dead ones; in groups of heads of alike lengths, slots are few more than tokens, and a
layer of two groups needs two calls of attention. The plain cache holds as many tokens as heads do in the mean: the
limit.

Budgets of heads are those of the calibration of the model (`mlx-kv calibrate`), or measured first. A text is read once;
the three sides decode copies of its caches, in turns, step by step. Ratios are medians of paired steps, of wall time
and of CPU time. Bytes are those of keys and values allocated, over tokens kept times bytes of a token. One JSON line
last.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import CachePolicy, calibrate, compact, load_calibration, make_prompt_cache
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.mlxlm.loading import load

# isort: split
import mlx.core as mx
import mlx.nn as nn

TEXTS, CHUNK = ("docs/architecture.md", "docs/families.md", "docs/server.md"), 512
WARM_UP = 40  # steps until caches have room for writes of one token alone
SIDES = ("plain", "one buffer", "groups")


def read(model: nn.Module, caches: list[Any], tokens: mx.array) -> None:
    for first in range(0, tokens.size, CHUNK):
        model(tokens[None, first : first + CHUNK], cache=caches)
        mx.eval([cache.state for cache in caches])


def step(model: nn.Module, caches: list[Any], token: int) -> tuple[float, float]:
    """Seconds of one step, and seconds of all processors."""
    started, used = time.perf_counter(), time.process_time()
    mx.eval(model(mx.array([[token]]), cache=caches)[:, -1].argmax(axis=-1))
    return time.perf_counter() - started, time.process_time() - used


def bytes_over_tokens(caches: list[Any]) -> float:
    return sum(cache.view.stored_bytes for cache in caches) / sum(cache.nbytes_live for cache in caches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory or a hub id")
    parser.add_argument("--calibration", help="a file of mlx-kv calibrate; without it, budgets of heads are measured")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()
    model, tokenizer = load(given.model)[:2]
    root = Path(__file__).parent.parent
    tokens = mx.array(tokenizer.encode("".join((root / text).read_text() for text in TEXTS))[: given.context])
    if given.calibration:
        heads = load_calibration(given.calibration).heads
    else:
        heads = calibrate(model, tokenizer, budgets_only=True).heads
    grouping = KVCache._group_heads

    def group(on: bool) -> None:
        KVCache._group_heads = grouping if on else lambda *_: None

    group(False)
    base = make_prompt_cache(model, CachePolicy(budget=given.budget, share="head", layers=heads, score="key_norm"))
    read(model, base, tokens)
    compact(base)
    for _ in range(WARM_UP):
        step(model, base, 1)
    sides = {"one buffer": copy.deepcopy(base), "groups": copy.deepcopy(base), "plain": make_prompt_cache(model)}
    for _ in range(base[0].layout.slack + 2):  # heads are grouped after the next compaction
        for name, on in (("one buffer", False), ("groups", True)):
            group(on)
            step(model, sides[name], 1)
    held = given.budget + base[0].layout.slack + 1
    read(model, sides["plain"], tokens[:held])
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    allocated: dict[str, list[float]] = {"one buffer": [], "groups": []}
    for number in range(given.steps):
        ahead = sides["plain"][0].size() - min(sides["groups"][0].size(), held - 1)
        for cache in sides["plain"]:
            cache.trim(max(0, ahead))
        for name in (*SIDES[number % 3 :], *SIDES[: number % 3]):
            group(name == "groups")
            times[name].append(step(model, sides[name], int(tokens[number])))
        for name, each in allocated.items():
            each.append(bytes_over_tokens(sides[name]))
    report: dict[str, float] = {}
    for name in ("one buffer", "groups"):
        pairs = list(zip(times[name], times["plain"], strict=True))
        report[f"{name}, step"] = statistics.median(own[0] / plain[0] for own, plain in pairs)
        report[f"{name}, cpu"] = statistics.median(own[1] / plain[1] for own, plain in pairs)
        report[f"{name}, bytes"] = statistics.median(allocated[name])
    pairs = list(zip(times["groups"], times["one buffer"], strict=True))
    report["groups / one buffer, step"] = statistics.median(own[0] / other[0] for own, other in pairs)
    report["groups / one buffer, cpu"] = statistics.median(own[1] / other[1] for own, other in pairs)
    counts = [len(cache.view.groups.groups) if cache.view.groups else 0 for cache in sides["groups"]]
    for name, ratio in report.items():
        print(f"{name:28} {ratio:.3f}")
    ratios = {name: round(ratio, 3) for name, ratio in report.items()}
    print(json.dumps({"budget": given.budget, "context": tokens.size, "layers_of_two": counts.count(2), **ratios}))


if __name__ == "__main__":
    main()
