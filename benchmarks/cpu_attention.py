"""Attention and activation on a CPU: ours, which `mlx_kv.load` puts in the place of MLX's, in one process.

    python benchmarks/cpu_attention.py [--model build/smollm2] [--prompts 256,1024,4096] [--contexts 1024,8192]
    python benchmarks/cpu_attention.py --calls

With --calls, single calls of attention and of swiglu are timed instead, each computed by MLX and by us, in turns: the
sizes from which `mlxlm/cpu.py` computes them are those where ours is at least 1.2 times as fast.

The same model reads prompts in chunks of 512 and decodes: as MLX computes it, with our attention alone, and with our
attention and activation, in turns. The first token of each prompt must be the same. Contexts of decoding are random
keys and values: what attention takes does not depend on them.

The physics. MLX's attention on a CPU multiplies queries and keys, hides what the mask hides, takes the softmax and
multiplies with values. On an x86-64 CPU its exponential takes 17 to 20 ns a number, one number at a time; products of
64 channels take 0.3 ns a number for two threads. So softmax is nine tenths of it, and with it of long prompts. Ours
takes 1 to 3 ns for a power of a softmax, leaves out the half that a causal mask hides, and works in blocks of 1 MB of
scores, since new memory costs a CPU more than arithmetic. A similar exponential is in the activation of gated MLPs
(silu), a third of what is left. Then it is mostly products of weights: the limit, which nothing here comes below.

Ratios are MLX / ours (both) of seconds: more than 1 is in our favour. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx_kv  # first: it loads a tuned BLAS

# isort: split
import mlx.core as mx
from common import take_turns
from mlx_lm import load
from mlx_lm.models import activations
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from mlx_kv import make_prompt_cache
from mlx_kv.bundled import model_path
from mlx_kv.cache.attention import Dense, Packed, attend
from mlx_kv.cache.codecs import Packing
from mlx_kv.mlxlm.attention import AttentionPatch
from mlx_kv.mlxlm.cpu import CpuAttention, patch_activation, quick_swiglu

CHUNK, STEPS = 512, 8


def read(model: Any, tokens: mx.array) -> tuple[float, int]:
    """Seconds until a prompt is read, and the token that comes next."""
    caches, started = make_prompt_cache(model), time.perf_counter()
    for first in range(0, tokens.shape[1] - 1, CHUNK):
        model(tokens[:, first : min(first + CHUNK, tokens.shape[1] - 1)], cache=caches)
        mx.eval([cache.state for cache in caches])
    token = mx.argmax(model(tokens[:, -1:], cache=caches)[0, -1]).item()
    return time.perf_counter() - started, int(token)


def decode(model: Any, context: int) -> float:
    """Seconds of a token after a context, the median of some."""
    caches = make_prompt_cache(model)
    model(mx.array([[1]]), cache=caches)
    for layer, cache in enumerate(caches):
        keys, values = cache.keys_and_values()
        shape = (*keys.shape[:2], context, keys.shape[3])
        x = mx.random.normal(shape, key=mx.random.key(layer)).astype(values.dtype)
        cache.update_and_fetch(x, x)
        mx.eval(cache.state)
    seconds = []
    for token in range(STEPS):
        started = time.perf_counter()
        mx.eval(model(mx.array([[token]]), cache=caches))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def of_calls(rounds: int) -> dict[str, float]:
    """MLX / ours of seconds, of calls of the sizes at which it is decided who computes them.

    Calls alternate, so that neither side finds its operands in the caches of the CPU: as in a model of many layers.
    """

    def ratio(mlx: Callable[[], mx.array], ours: Callable[[], mx.array]) -> float:
        def seconds(call: Callable[[], mx.array]) -> float:
            started = time.perf_counter()
            mx.eval(call())
            return time.perf_counter() - started

        runs = take_turns(rounds * STEPS, {"mlx": lambda: seconds(mlx), "ours": lambda: seconds(ours)})
        return round(statistics.median(runs["mlx"]) / statistics.median(runs["ours"]), 2)

    found = {}
    for size in (256, 1536, 2048, 4096, 6144, 24576, 393216):
        gate, x = mx.random.normal((2, 1, size))
        found[f"swiglu {size}"] = ratio(partial(activations.swiglu, gate, x), partial(quick_swiglu, gate, x))
    for heads, kv_heads in ((9, 3), (8, 8)):
        for new, slots in ((1, 2048), (1, 8192), (4, 256), (4, 1024), (32, 128), (32, 1024), (512, 512), (512, 2048)):
            queries = mx.random.normal((1, heads, new, 64))
            keys, values = mx.random.normal((2, 1, kv_heads, slots, 64))
            mask = None if new == 1 else "causal"
            plain = partial(mx.fast.scaled_dot_product_attention, queries, keys, values, scale=0.125, mask=mask)
            ours = partial(attend, queries, Dense(keys), Dense(values), 0.125, mask, None)
            found[f"attention {new} x {slots}, {heads} heads on {kv_heads}"] = ratio(plain, ours)
            for bits in (8, 4) if heads != kv_heads else ():
                planes, packing = mx.quantize(keys, group_size=64, bits=bits), Packing(bits, 64)
                how = {"scale": 0.125, "mask": mask, "group_size": 64, "bits": bits}
                packed = partial(_of_planes, queries, planes, how)  # mlx-lm scales queries in place
                ours = partial(attend, queries, Packed(planes, packing), Packed(planes, packing), 0.125, mask, None)
                found[f"attention {new} x {slots}, {bits} bits"] = ratio(packed, ours)
    return found


def _of_planes(queries: mx.array, planes: Any, how: dict[str, Any]) -> mx.array:
    answer: mx.array = quantized_scaled_dot_product_attention(queries[...], planes, planes, **how)
    return answer


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a directory; without it, the bundled reference model")
    parser.add_argument("--prompts", type=numbers, default=[256, 1024, 4096])
    parser.add_argument("--contexts", type=numbers, default=[1024, 8192])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--calls", action="store_true", help="single calls, without a model")
    asked = parser.parse_args()
    if asked.calls:
        print(json.dumps({"benchmark": "cpu_attention", "device": str(mx.default_device()), **of_calls(asked.rounds)}))
        return
    model, tokenizer = load(model_path("reference") if asked.model is None else asked.model)[:2]
    model.set_dtype(mx.float32)
    text = "".join(Path(module.__file__ or "").read_text() for module in (argparse, json, statistics))
    tokens = mx.array([tokenizer.encode(text)[: max(asked.prompts)]])

    def sides(work: Callable[..., Any], *arguments: Any) -> dict[str, Callable[[], Any]]:
        def ours() -> Any:
            with AttentionPatch(model, backend=CpuAttention()):
                return work(*arguments)

        def both() -> Any:
            undo = patch_activation(model)
            try:
                return ours()
            finally:
                undo()

        return {"mlx": lambda: work(*arguments), "attention": ours, "ours": both}

    line: dict[str, Any] = {"benchmark": "cpu_attention", "device": str(mx.default_device())}
    line["blas"] = Path(mlx_kv.blas.preload()).name
    for count in asked.prompts:
        got = take_turns(asked.rounds, sides(read, model, tokens[:, :count]))
        assert len({token for runs in got.values() for _, token in runs}) == 1, "another token comes next"
        took = {side: statistics.median(seconds for seconds, _ in runs) for side, runs in got.items()}
        line[f"read_{count}"] = {side: round(seconds, 4) for side, seconds in took.items()}
        line[f"read_{count}_ratio"] = round(took["mlx"] / took["ours"], 3)
        told = "".join(f"  {side} {seconds:8.3f} s" for side, seconds in took.items())
        print(f"reading {count:6,} tokens{told}", file=sys.stderr)
    for context in asked.contexts:
        runs = take_turns(asked.rounds, sides(decode, model, context))
        took = {side: statistics.median(each) for side, each in runs.items()}
        line[f"decode_{context}"] = {side: round(seconds, 5) for side, seconds in took.items()}
        line[f"decode_{context}_ratio"] = round(took["mlx"] / took["ours"], 3)
        told = "".join(f"  {side} {seconds * 1e3:7.1f} ms" for side, seconds in took.items())
        print(f"a token after {context:6,}{told}", file=sys.stderr)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
