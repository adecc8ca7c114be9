"""What ranks run in tests of models in parts: every case alone first, and then on all ranks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from families import make_family

from mlx_kv import CachePolicy, make_prompt_cache
from mlx_kv.mlxlm.traverse import attention_caches, leaves
from mlx_kv.ranks.peers import peers_of
from mlx_kv.ranks.splitting import split_model

PROMPT = [(7 * i * i + 3 * i) % 90 for i in range(70)]
STEPS = 40
BUDGET = {"budget": 40, "keep_recent": 6, "sinks": 2, "margin": 5}
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bits": {"bits": 8, "group_size": 32},
    "ring": {"max_kv_size": 24, "max_write": 16},
    **{share: {**BUDGET, "share": share} for share in ("layers", "layer", "head")},
    "norm": {**BUDGET, "score": "key_norm"},
    "random": {**BUDGET, "score": "random"},
    "budget and bits": {**BUDGET, "bits": 8, "group_size": 32},
}


@dataclass(frozen=True)
class Ranks:
    """As much of a group as a part of a model needs."""

    raw: mx.distributed.Group
    split: str


def join(split: str) -> Ranks:
    return Ranks(mx.distributed.init(strict=True, backend="ring"), split)


def decode(model: nn.Module, caches: list[Any]) -> tuple[list[int], mx.array]:
    """A prompt in chunks and then greedy tokens, under mlx-lm's stream; the tokens, and the logits of the last one."""
    from mlx_lm.generate import generation_stream

    tokens: list[int] = []
    with mx.stream(generation_stream):
        for first in range(0, len(PROMPT), 16):
            logits = model(mx.array([PROMPT[first : first + 16]]), cache=caches)
            mx.eval(logits)
        for _ in range(STEPS):
            tokens.append(int(mx.argmax(logits[0, -1]).item()))
            logits = model(mx.array([[tokens[-1]]]), cache=caches)
            mx.eval(logits)
    return tokens, logits[0, -1]


def kept(caches: list[Any]) -> list[Any]:
    """The positions that each layer of full attention has left, of each head that keeps its own."""
    return [
        [sorted(head) for head in cache.positions[0].tolist()]
        for cache in attention_caches(caches)
        if cache.evictor is not None
    ]


def in_part(whole: list[Any], part: nn.Module, split: str, share: str, group: mx.distributed.Group) -> list[Any]:
    """What of the tokens that a whole model has left is to be in a part."""
    if split == "heads":
        if share != "head":
            return whole
        heads = max(cache.keys.shape[1] for cache in attention_caches(alone_caches))
        count = heads // group.size()
        return [layer[group.rank() * count :][:count] for layer in whole]
    return whole


alone_caches: list[Any] = []


def cases(families: str, split: str) -> Iterator[tuple[str, str]]:
    for family in families.split(","):
        for policy in POLICIES:
            yield family, policy


def compare(split: str, layers: str, *families: str) -> None:
    """A line of JSON for each family and policy: tokens and what is left, alone and in parts."""
    ranks = join(split)
    counts = [int(word) for word in layers.split(",")] if layers else None
    for family in families:
        whole = make_family(family)
        alone = {name: _run(whole, settings) for name, settings in POLICIES.items()}
        split_model(whole, ranks, counts)
        for name, settings in POLICIES.items():
            told = {"family": family, "policy": name, "rank": ranks.raw.rank()}
            print(json.dumps({**told, "alone": alone[name], "parts": _run(whole, settings)}), flush=True)


def _run(model: nn.Module, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        caches = make_prompt_cache(model, CachePolicy(**settings), peers=peers_of(model))
    except ValueError as error:
        return {"refused": str(error)}
    tokens, logits = decode(model, caches)
    kinds = [type(cache).__name__ for cache in leaves(caches)]
    crc = zlib.crc32(memoryview(logits.astype(mx.float32)))
    return {"tokens": tokens, "kept": kept(caches), "kinds": kinds, "logits": crc}
