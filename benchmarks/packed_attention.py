"""What a token costs whose attention reads quantised keys and values: packed, or decoded first; by codec and context.

    python benchmarks/packed_attention.py [--contexts 4096,8192,16384,32768] [--heads 9,3] [--head-dim 64] [--dtype D]
    python benchmarks/packed_attention.py --model build/smollm2 [--decode 8192]

One layer: a query attends to a context of random keys and values, plain by MLX's attention and by ours, and in each
way of storing them: `mlx-lm` is its attention over packed planes (where it can read them), `ours` is ours, `decoded`
takes all of it to floats first, for MLX's. Answers of all ways agree, which is checked. With --model also tokens a
second of the whole model after --decode tokens, through the caches that `make_prompt_cache` gives for each codec.

The physics. A token reads every key and value once: 4 bytes an element in float32, 1 and 1/8 in 8 bits with scales and
biases of groups of 64. If reading were all, 8 bits would be 3.5 times as fast. On a GPU, `mx.quantized_matmul` turns
words into numbers in registers. On a CPU that is one number at a time, and takes longer than reading 4 bytes. Ours
turns a block of them into floats that stay in the CPU's caches, multiplies with a tuned BLAS, and applies scales and
biases to what comes out, once for a group (`mlx_kv.cache.attention`); for 3, 5 and 6 bits it cannot, since bytes
hold no whole number of those. Rotated ones cost a transform of the query and of the answer.

Milliseconds are medians of rounds in which all ways take turns. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from mlx_kv import CachePolicy, make_prompt_cache  # first: importing the package loads a tuned BLAS

# isort: split
import mlx.core as mx
from common import take_turns
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from mlx_kv.cache.attention import Dense, Packed, attend
from mlx_kv.cache.codecs import Affine, Centre, Centred, CentredByLayer, find_codecs, packing_of, packings_of
from mlx_kv.calibration.loss import measure_centres
from mlx_kv.mlxlm.loading import load

CODECS: dict[str, dict[str, Any]] = {
    "K8V8": {"bits": 8},
    "K8V4": {"bits": (8, 4)},
    "K4V4": {"bits": 4},
    "K4V4 rotated": {"bits": 4, "codec": "rotated"},
    "K4V4 centred": {"codec": "centred"},  # keys; where they lie, is of a tensor or of a model
    "K4V2": {"bits": (4, 2)},
    "K6V4": {"bits": (6, 4)},
    "K3V3": {"bits": 3},
    "mxfp8": {"codec": "mxfp8"},
    "mxfp4": {"codec": "mxfp4"},
}
CENTRED, ROTATED = CODECS["K4V4 centred"], Affine(4, 64, rotate=True)
# Of a whole model only: what stands beside the slots is no tensor that could be encoded.
RESIDUALS: dict[str, dict[str, Any]] = {
    f"{name}, newest 64 as they came": {"bits": bits, "codec": "rotated", "residual_length": 64}
    for name, bits in (("K4V4 rotated", 4), ("K8V4 rotated", (8, 4)))
}
# Of the norm of answers, which are sums of random values that nearly cancel.
TOLERANCE = {mx.float32: 1e-3, mx.bfloat16: 1e-1}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def one_layer(context: int, heads: list[int], dim: int, rounds: int, dtype: mx.Dtype) -> dict[str, float]:
    """Milliseconds of each way of each codec."""
    query_heads, kv_heads = heads
    q, k, v = (
        mx.random.normal((1, h, n, dim), dtype) for h, n in ((query_heads, 1), (kv_heads, context), (kv_heads, context))
    )
    scale = dim**-0.5
    mx.eval(q, k, v)
    ways: dict[str, Callable[[], mx.array]] = {
        "plain, MLX": lambda: mx.fast.scaled_dot_product_attention(q, k, v, scale=scale),
        "plain, ours": lambda: attend(q, Dense(k), Dense(v), scale),
    }
    for name, how in CODECS.items():
        centred_keys = Centred(Centre.of(k), ROTATED), ROTATED
        keys, values = centred_keys if how == CENTRED else find_codecs(how.get("bits"), 64, how.get("codec"))
        of_keys, of_values = keys.encode(k), values.encode(v)
        mx.eval(of_keys, of_values)
        assert keys.packed is not None
        assert values.packed is not None
        packed = Packed(of_keys, keys.packed), Packed(of_values, values.packed)
        ways[f"{name}, ours"] = lambda packed=packed: attend(q, *packed, scale)
        ways[f"{name}, decoded"] = lambda keys=keys, values=values, a=of_keys, b=of_values: (
            mx.fast.scaled_dot_product_attention(q, keys.decode(a, q.dtype), values.decode(b, q.dtype), scale=scale)
        )
        if (how_packed := packing_of((keys, values))) is not None:
            ways[f"{name}, mlx-lm"] = lambda a=of_keys, b=of_values, p=how_packed: (
                quantized_scaled_dot_product_attention(q[...], a, b, scale, None, p.group_size, p.bits)
            )
        answers = [way() for way_name, way in ways.items() if way_name.startswith(f"{name}, ")]
        for answer in answers[1:]:
            error = mx.sqrt(mx.square(answer - answers[0]).sum() / mx.square(answers[0]).sum()).item()
            assert error < TOLERANCE[dtype], f"ways of {name} differ: {error:.4f}"

    def timed(way: Callable[[], mx.array]) -> float:
        started = time.perf_counter()
        mx.eval(way())
        return (time.perf_counter() - started) * 1e3

    runs = take_turns(rounds, {name: lambda way=way: timed(way) for name, way in ways.items()})
    return {name: round(statistics.median(each), 3) for name, each in runs.items()}


def filled(model: Any, how: dict[str, Any], context: int) -> list[Any]:
    """Caches of random keys and values."""
    if how == CENTRED:
        how = {"codec": (CentredByLayer(measure_centres(model, range(3, 131)), ROTATED), ROTATED)}
    caches = make_prompt_cache(model, CachePolicy(reserve=context + 64, **how))
    shapes = make_prompt_cache(model)
    model(mx.array([[1]]), cache=shapes)
    for layer, (cache, shape) in enumerate(zip(caches, shapes, strict=True)):
        _, heads, _, dim = shape.keys_and_values()[0].shape
        for first in range(0, context, 1024):
            x = mx.random.normal((1, heads, min(1024, context - first), dim), key=mx.random.key(layer))
            cache.update_and_fetch(x, x)
            mx.eval(cache.state)
    return caches


def whole_model(path: str, context: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of each codec, and bytes of its caches."""
    model, _tokenizer = load(path)
    kinds: dict[str, dict[str, Any]] = {"plain": {}} | CODECS | RESIDUALS
    caches = {name: filled(model, how, context) for name, how in kinds.items()}

    def step(own: list[Any]) -> float:
        started = time.perf_counter()
        mx.eval(model(mx.array([[5]]), cache=own))
        return time.perf_counter() - started

    runs = take_turns(rounds, {name: lambda own=own: step(own) for name, own in caches.items()})
    made: dict[str, Any] = {}
    for name, each in runs.items():
        seconds, held = statistics.median(each), sum(cache.nbytes_live for cache in caches[name])
        ours = packings_of(caches[name][0].view.codecs) is not None
        made[name] = {"tokens_per_second": round(1 / seconds, 2), "bytes_per_token": held // (context + rounds + 1)}
        made[name]["read_by"] = "ours" if ours else "mlx-lm's, or ours on a CPU"
        print(f"{name:<38} {1 / seconds:7.2f} tokens/s  {held / 1e6:7.1f} MB", file=sys.stderr)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=numbers, default=[4096, 8192, 16384, 32768])
    parser.add_argument("--heads", type=numbers, default=[9, 3], help="of queries, of keys and values")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the one layer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", help="a directory: decode through all of its layers as well")
    parser.add_argument("--decode", type=int, default=8192, help="tokens before those that are decoded")
    asked = parser.parse_args()
    line: dict[str, Any] = {"benchmark": "packed_attention", "device": str(mx.default_device())}
    for context in asked.contexts:
        line[f"layer_{context}"] = found = one_layer(
            context, asked.heads, asked.head_dim, asked.rounds, getattr(mx, asked.dtype)
        )
        plain = min(found["plain, MLX"], found["plain, ours"])
        print(f"{context:,} tokens, ms a layer (plain, the faster: {plain})", file=sys.stderr)
        for name, took in found.items():
            print(f"  {name:<24} {took:9.3f}   {plain / took:5.2f} of plain's speed", file=sys.stderr)
    if asked.model is not None:
        line[f"decode_{asked.decode}"] = whole_model(asked.model, asked.decode, asked.rounds)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
