"""What a decode step costs in calls: operations that a GPU launches for one layer of a model, by kind of cache.

    python benchmarks/operations.py

The physics. Describing, encoding and launching an operation takes a host about 20 us in a chain, in which a GPU reads
tens of megabytes: the step of a small or middling model takes as long as its calls. So calls are what a cache may add.

Counted, not timed, from the graph of one step of a random llama: that of a model of three layers less that of two.
Views (slices, reshapes, broadcasts) launch nothing; a concatenation launches one copy for each of its parts. Without a
GPU the graph is the one that a GPU would get: normalisation, rotation and attention, which MLX takes apart on a CPU,
count as the one call that they are there; as on CUDA, quantised planes are not read in slices. mlx-lm's own caches are
counted in the same way, though CUDA has no kernel for its slices; a ratio is mlx-lm / ours, of the nearest kind of
cache that it has (more than 1: we launch fewer). It has no segments: copies stand for them there.
One JSON line last.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import CachePolicy

# isort: split
import mlx.core as mx
import mlx_lm.models.cache as stock
from mlx_lm.models import llama

from mlx_kv.cache.buffers import on_cpu
from mlx_kv.generation.engine import EngineSettings, make_engine
from mlx_kv.generation.prefill import announce
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.mlxlm.attention import AttentionPatch
from mlx_kv.mlxlm.cuda import CudaAttention

VIEWS = set(
    "AsStrided Broadcast BroadcastAxes Depends ExpandDims Flatten NumberOfElements Reshape Slice Split Squeeze "
    "StopGradient Transpose Unflatten View".split()
)
FUSED = "fused"  # what stands for a call that MLX takes apart on a CPU
NODE = re.compile(r"\{ (\w+) \[label =\"(\w+)\", shape=rectangle\]; \}")
EDGE = re.compile(r"\"\w+\" -> (\w+)")
OFTEN = 3_000  # tokens that several rows share: more than enough to be held once, on any device


def words(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(500) for _ in range(count)]


RAGGED = [words(100, 1), words(90, 2)]
SHARED = [words(OFTEN, 0) + words(count, count) for count in [10, 12] + [8] * 40]
CASES: dict[str, tuple[CachePolicy | None, list[list[int]], int]] = {
    "one row": (None, RAGGED[:1], 1),
    "rows of one length": (None, [words(100, 1), words(100, 2)], 1),
    "rows of different lengths": (None, RAGGED, 1),
    "drafts of 4 tokens": (None, RAGGED, 5),
    "a budget": (CachePolicy(budget=64), RAGGED, 1),
    "a budget, by attention": (CachePolicy(budget=64, score="snap_kv"), RAGGED, 1),
    "a window": (CachePolicy(max_kv_size=64), RAGGED, 1),
    "8 bits, one row": (CachePolicy(bits=8), RAGGED[:1], 1),
    "8 bits": (CachePolicy(bits=8), RAGGED, 1),
    "4 bits": (CachePolicy(bits=4), RAGGED, 1),
    "4 bits, newest as they came": (CachePolicy(bits=4, residual_length=32), RAGGED, 1),
    "segments": (None, SHARED, 1),
    "segments, drafts of 4 tokens": (None, SHARED, 5),
    "segments, 8 bits": (CachePolicy(bits=8), SHARED, 1),
    "segments of all rows but one": (None, [*SHARED, words(OFTEN, 3)], 1),
}
STOCK: dict[str, tuple[Callable[[], Any], list[list[int]]]] = {
    "mlx-lm, one row": (stock.KVCache, RAGGED[:1]),
    "mlx-lm, rows of different lengths": (lambda: stock.BatchKVCache([0, 10]), RAGGED),
    "mlx-lm, a window": (lambda: stock.BatchRotatingKVCache(64, [0, 10]), RAGGED),
    "mlx-lm, 8 bits, one row": (lambda: stock.QuantizedKVCache(64, 8), RAGGED[:1]),
}
PEERS = {"one row": "one row", "rows of one length": "one row", "a window": "a window"}
IN_BITS = "8 bits, one row"  # mlx-lm has no batches of quantised caches


def random_llama(layers: int) -> llama.Model:
    mx.random.seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 512, "num_hidden_layers": layers}
    model = llama.Model(llama.ModelArgs.from_dict({**shape, **more, "tie_word_embeddings": True}))
    mx.eval(model.parameters())
    return model


def operations(arrays: Sequence[mx.array]) -> Counter[str]:
    """What is launched to compute arrays, by the name of the operation."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    lines = [line.strip() for line in text.getvalue().splitlines()]
    inputs = Counter(match.group(1) for line in lines if (match := EDGE.match(line)))
    counts = Counter[str]()
    for node, name in (match.groups() for line in lines if (match := NODE.match(line))):
        if name == "Depends" and not has_gpu():  # what `fused` leaves
            counts[FUSED] += 1
        elif name not in VIEWS:
            counts[name] += inputs[node] if name == "Concatenate" else 1
    return counts


def has_gpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.gpu)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Graphs are those that a GPU gets. They are not computed."""
    if has_gpu():
        yield
        return

    def fused(shape: Sequence[int], x: mx.array, *others: Any) -> mx.array:
        result = mx.zeros(shape, x.dtype)
        mx.eval(result)
        return mx.depends([result], [x, *(other for other in others if isinstance(other, mx.array))])[0]

    def attention(q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, **more: Any) -> mx.array:
        return fused((*q.shape[:3], v.shape[3]), q, k, v, mask, *more.values())

    def alike(x: mx.array, *others: Any, offset: Any = None, **more: Any) -> mx.array:
        return fused(x.shape, x, *others, offset)

    modules = [module for name, module in list(sys.modules.items()) if name.startswith("mlx_kv.")]
    replaced: list[tuple[Any, str, Any]] = [
        *((module, "on_cpu", lambda: False) for module in modules if getattr(module, "on_cpu", None) is on_cpu),
        (mx.cuda, "is_available", lambda: True),  # which needs most: it takes no slices of quantised planes
        (mx.fast, "scaled_dot_product_attention", attention),
        (mx.fast, "rms_norm", alike),
        (mx.fast, "rope", alike),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def of_a_step(model: llama.Model, caches: list[Any], rows: int, new: int) -> Counter[str]:
    """What the pass of `new` tokens of each row launches, the update of the caches included."""
    mx.eval([cache.state for cache in caches])
    with as_on_a_gpu():
        announce(caches, [new] * rows)
        logits = model(mx.zeros((rows, new), mx.int32), cache=caches)
        return operations([logits, *(plane for cache in caches for plane in planes_of(cache))])


def planes_of(cache: Any) -> list[mx.array]:
    """The arrays of a cache: what its next update continues from."""
    if hasattr(cache, "parts"):
        return [plane for part in cache.parts for buffer in part.buffers or () for plane in buffer.planes]
    both = (cache.keys, cache.values)
    return [plane for planes in both for plane in (planes if isinstance(planes, (list, tuple)) else (planes,))]


def of_engine(layers: int, policy: CachePolicy | None, prompts: list[list[int]], new: int) -> Counter[str]:
    """Of our caches, as an engine holds them."""
    model = random_llama(layers)
    patch = AttentionPatch(model, backend=CudaAttention())  # as `mlx_kv.load` has it there
    engine = make_engine(model, set(), policy, EngineSettings(max_batch_size=len(prompts)))
    for number, prompt in enumerate(prompts):
        engine.submit(TokenSequence(number, prompt, 100))
    while len(engine.rows) < len(prompts):
        engine.step()
    for _ in range(4):
        engine.step()
    with patch:
        return of_a_step(model, engine.caches, len(prompts), new)


def of_stock(layers: int, make: Callable[[], Any], prompts: list[list[int]]) -> Counter[str]:
    """Of mlx-lm's caches."""
    model, caches = random_llama(layers), [make() for _ in range(layers)]
    longest = max(map(len, prompts))
    tokens = mx.array([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    for _ in range(2):
        model(tokens, cache=caches)
        tokens = tokens[:, :1]
    return of_a_step(model, caches, len(prompts), 1)


def of_a_layer(count: Callable[..., Counter[str]], *arguments: Any) -> Counter[str]:
    two, three = (count(layers, *arguments) for layers in (2, 3))
    return three - two


def measure(names: Sequence[str] = (*CASES, *STOCK)) -> dict[str, int]:
    """Operations of a layer, by case."""
    chosen = {name: CASES[name] for name in names if name in CASES}
    counts = {name: of_a_layer(of_engine, *case) for name, case in chosen.items()}
    counts |= {name: of_a_layer(of_stock, *STOCK[name]) for name in names if name in STOCK}
    return {name: counts[name].total() for name in names}


def main() -> None:
    if len(sys.argv) > 1:
        print(__doc__)
        return
    counts = measure()
    results: dict[str, Any] = {"benchmark": "operations", "device": str(mx.default_device()), "counts": counts}
    for name in CASES:
        peer = counts[f"mlx-lm, {IN_BITS if 'bits' in name else PEERS.get(name, 'rows of different lengths')}"]
        print(f"{name:32} {counts[name]:3}, mlx-lm {peer:3}")
        results[name] = {"ours": counts[name], "mlx_lm": peer, "ratio": round(peer / counts[name], 3)}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
