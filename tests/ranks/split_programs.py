"""What ranks run in tests of models in parts: every case alone first, then on all ranks; a line of JSON for each."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

sys.path.append(str(Path(__file__).parent.parent / "mlxlm"))  # where the families are

import mlx_kv  # before MLX: it loads a tuned BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import random_rows as rows
from calibrations import random_calibration
from families import make_family
from mlx_lm.generate import generation_stream
from tiny_models import make_model

from mlx_kv import CachePolicy, make_prompt_cache
from mlx_kv.communicator import LOCAL, CacheCommunicator
from mlx_kv.files.serialization import model_fingerprint
from mlx_kv.mlxlm.loading import weights_of
from mlx_kv.mlxlm.traverse import attention_caches
from mlx_kv.ranks import communicator as exchange
from mlx_kv.ranks.communicator import cache_communicator_of
from mlx_kv.ranks.splitting import Split, load_part, part_of, split_model

T = TypeVar("T")
PROMPT = [(7 * i * i + 3 * i) % 90 for i in range(70)]
STEPS = 16
BUDGET: dict[str, Any] = {"budget": 40, "keep_recent": 6, "sinks": 2, "margin": 5}
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bits": {"bits": 8, "group_size": 32},
    "ring": {"max_kv_size": 24, "max_write": 16},
    **{share: {**BUDGET, "share": share} for share in ("layers", "layer", "head")},
    "norm": {**BUDGET, "score": "key_norm"},
    "random": {**BUDGET, "score": "random"},
    "budget and bits": {**BUDGET, "bits": 8, "group_size": 32},
    **{score: {**BUDGET, "score": score} for score in ("snap_kv", "tova")},
}


@dataclass
class Ranks:
    """As much of a group as a part of a model needs."""

    raw: mx.distributed.Group
    split: Split | None


def join(split: Any) -> Ranks:
    return Ranks(mx.distributed.init(strict=True, backend="ring"), split or None)


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def decode(model: nn.Module, caches: list[Any]) -> dict[str, Any]:
    """A prompt in chunks and then greedy tokens: those, a sum of the last logits, and what is left in each layer."""
    tokens: list[int] = []
    with mx.stream(generation_stream):
        for first in range(0, len(PROMPT), 16):
            logits = model(mx.array([PROMPT[first : first + 16]]), cache=caches)
            mx.eval(logits)
        for _ in range(STEPS):
            tokens.append(int(mx.argmax(logits[0, -1]).item()))
            logits = model(mx.array([[tokens[-1]]]), cache=caches)
            mx.eval(logits)
    return {"tokens": tokens, "kept": kept(caches), "logits": zlib.crc32(memoryview(logits.astype(mx.float32)))}


def kept(caches: list[Any]) -> list[list[list[int]]]:
    """The positions that each layer with a budget has left, of each head that keeps its own."""
    budgeted = [cache for cache in attention_caches(caches) if cache.evictor is not None]
    return [[sorted(p for p in head if p >= 0) for head in cache.positions[0].tolist()] for cache in budgeted]


def run(model: nn.Module, settings: dict[str, Any], communicator: CacheCommunicator | None = None) -> dict[str, Any]:
    try:
        caches = make_prompt_cache(
            model, CachePolicy(**settings), peers=cache_communicator_of(model) if communicator is None else communicator
        )
    except ValueError as error:
        return {"refused": str(error)}
    done, calls = counted(lambda: decode(model, caches))
    compactions = max((cache.evictor.compactions for cache in attention_caches(caches) if cache.evictor), default=0)
    return {**done, "collectives": calls, "compactions": compactions}


def counted(act: Callable[[], T]) -> tuple[T, int]:
    """What is done, and how often the ranks had to tell each other their scores."""
    calls, all_gather = 0, exchange.all_gather

    def one_more(x: mx.array, group: mx.distributed.Group) -> mx.array:
        nonlocal calls
        calls += 1
        return all_gather(x, group)

    exchange.all_gather = one_more
    try:
        done = act()
        return done, calls
    finally:
        exchange.all_gather = all_gather


def families(split: str, layers: str, *cases: str) -> None:
    """Every case FAMILY:POLICY,POLICY alone, and in parts; of FAMILY/4 the weights have 4 bits."""
    ranks = join(split)
    for case in cases:
        family, _, names = case.partition(":")
        family, _, bits = family.partition("/")
        model = make_family(family)
        if bits:
            nn.quantize(model, 32, int(bits))
        policies = {name: POLICIES[name] for name in names.split(",")}
        alone = {name: run(model, settings) for name, settings in policies.items()}
        split_model(model, ranks, [int(word) for word in layers.split(",")] if layers else None)
        for name, settings in policies.items():
            part, of = run(model, settings), part_of(model)
            tell(family=family, policy=name, alone=alone[name], part=part, copies=of is not None and of.copies)


def tables(split: str, layers: str) -> None:
    """Budgets of heads by a table, and the fitted score, of a model of four layers of two KV heads."""
    ranks = join(split)
    model = make_family("qwen2")
    table = [[5.0, 0.2], [0.5, 1.0], [0.0, 1.4], [1.0, 0.4]]
    measured = random_calibration(2, 32, 4, fingerprint=model_fingerprint(model))
    policies: dict[str, dict[str, Any]] = {
        **{
            f"{share}, {score}": {**BUDGET, "share": share, "layers": table, "score": score}
            for share in ("head", "layer", "adaptive")
            for score in ("key_diff", "key_norm")
        },
        "head, column": {**BUDGET, "share": "head", "layers": [[2.0], [1.0], [0.3], [1.0]]},
        "head, more rows": {**BUDGET, "share": "head", "layers": [*table, [1.0, 1.0]]},
        "fitted": {**BUDGET, "calibration": measured, "layers": table, "share": "head"},
        "fitted, layers": {**BUDGET, "calibration": measured, "layers": "uniform", "share": "layers"},
    }
    alone = {name: run(model, settings) for name, settings in policies.items()}
    split_model(model, ranks, [int(word) for word in layers.split(",")] if layers else None)
    for name, settings in policies.items():
        tell(policy=name, alone=alone[name], part=run(model, settings))


def unheard(split: str) -> None:
    """The shares of a budget, and one more time ranks that decide for themselves."""
    ranks = join(split)
    model = make_family("qwen3_moe")
    alone = {share: run(model, POLICIES[share]) for share in ("layers", "layer", "head")}
    split_model(model, ranks)
    for share, whole in alone.items():
        tell(policy=share, alone=whole, part=run(model, POLICIES[share]))
    tell(policy="unheard", alone=alone["layers"], part=run(model, POLICIES["layers"], LOCAL))


def three_heads() -> None:
    """Nine heads on three of keys and values, as SmolLM2 has them."""
    ranks = join("heads")
    model = make_model("llama", num_attention_heads=9, num_key_value_heads=3, intermediate_size=96)
    names = ("layers", "head")
    alone = [run(model, POLICIES[name]) for name in names]
    split_model(model, ranks)
    for name, whole in zip(names, alone, strict=True):
        tell(policy=name, alone=whole, part=run(model, POLICIES[name]))


def windows_alone() -> None:
    """A rank whose layers all have windows, beside one with a layer of full attention."""
    ranks = join("layers")
    model = make_family("ministral3")
    full = [not layer.use_sliding for layer in model.model.layers]
    count = full.index(True)  # the last rank has the first layers
    layers = [len(full) - count, count] if count else [full[::-1].index(True), len(full) - full[::-1].index(True)]
    alone = {name: run(model, POLICIES[name]) for name in ("plain", "layers", "layer")}
    split_model(model, ranks, layers)
    for name, whole in alone.items():
        tell(policy=name, alone=whole, part=run(model, POLICIES[name]))


def loading(path: str, split: str, layers: str) -> None:
    """The bytes that a part takes, while it is loaded and then, and what it says."""
    ranks = join(split)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model, _tokenizer = load_part(Path(path), ranks, [int(word) for word in layers.split(",")] if layers else None)
    held, peak = mx.get_active_memory() - before, mx.get_peak_memory() - before
    part = run(model, {})
    biggest = max(weight.nbytes for weight in weights_of(model))
    del model
    whole = mlx_kv.load(path)[0]
    told = sum(weight.nbytes for weight in weights_of(whole))
    tell(split=ranks.split, held=held, peak=peak, biggest=biggest, whole=told, alone=run(whole, {}), part=part)


def random_rows(split: str, first: str, last: str) -> None:
    """Caches of random keys and values: what is written, taken back, copied, merged, filtered and loaded at random."""
    ranks = join(split)
    has, communicator = rows.part_of(split, ranks.raw), rows.communicator(split, ranks.raw)
    for seed in range(int(first), int(last)):
        alone = rows.played(seed, rows.ALL, LOCAL)
        kept = rows.played(seed, has, communicator).kept()
        tell(alone=alone.part(has), kept=kept, share=alone.policy.share, compactions=alone.compactions())


def order() -> None:
    """Scores that say whose they are: layer, row, head, token."""
    raw = join("").raw
    numbers = mx.arange(rows.LAYERS * 2 * rows.HEADS * 4).reshape(rows.LAYERS, 2, rows.HEADS, 4).astype(mx.float32)
    heads = [layer[:, rows.part_of("heads", raw).heads] for layer in numbers]
    layers = [numbers[layer, 0, :1] for layer in rows.part_of("layers", raw).layers]
    tell(heads=[layer.tolist() for layer in rows.communicator("heads", raw).gather_heads(heads)] == numbers.tolist())
    tell(rows=counted(lambda: rows.alike(3, rows.part_of("heads", raw), rows.communicator("heads", raw)))[1])
    heard = [layer.tolist() for layer in rows.communicator("layers", raw).gather_layers(layers)]
    tell(layers=[layer for layer in heard if any(layer[0])] == [layer[0, :1].tolist() for layer in numbers])
