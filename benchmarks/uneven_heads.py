"""Heads that keep different numbers of tokens, against uniform ones: what it costs, and what it buys.

    python benchmarks/uneven_heads.py --model build/smollm2 [--rounds 5] [--context 2048] [--budget 512] [--texts 3]

The physics. Decoding reads keys and values of all slots: a budget of 512 in 30 layers of 3 heads x 64 in float32 is
23.6 MB a step, beside 538 MB of weights. Where heads differ, a layer has as many slots as its longest head: bytes that
are allocated and read grow by longest / mean, and a mask of booleans for each query head comes on top, where uniform
heads need none at all.

Each side reads the same text in chunks of 512 and evicts down to the budget; then it goes on for 256 tokens that it is
told (what it loses: its nats per token less those of the full cache), and decodes on, in turns with the others, 32
tokens a turn. The texts are documents of this repository. By key_diff, which knows keys alone, and by snap_kv.
Ratios are side / share="head", the uniform one: milliseconds, bytes allocated and bytes of tokens. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import CachePolicy, compact, make_prompt_cache
from mlx_kv.mlxlm.loading import load

# isort: split
import mlx.core as mx
import mlx.nn as nn
from common import take_turns

TEXTS = ("docs/architecture.md", "docs/families.md", "docs/speculative.md")
TOLD, DECODED, CHUNK = 256, 32, 512
SIDES: dict[str, dict[str, Any]] = {
    "uniform": {"share": "head"},
    "adaptive": {"share": "adaptive"},
}
SCORES = ("key_diff", "snap_kv")


@dataclass
class Side:
    """The caches of one side after a text, and what came of it."""

    caches: list[Any]
    lost: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)


def nats(model: nn.Module, caches: list[Any], tokens: mx.array) -> float:
    """Of each of the tokens (n,) after the first, on average."""
    logits = model(tokens[None, :-1], cache=caches)[0].astype(mx.float32)
    return nn.losses.cross_entropy(logits, tokens[1:], reduction="mean").item()


def after(model: nn.Module, tokens: mx.array, policy: CachePolicy, context: int) -> tuple[list[Any], float]:
    """The caches after a text and what follows it, and the nats of that."""
    caches = make_prompt_cache(model, policy)
    for first in range(0, context, CHUNK):
        model(tokens[None, first : min(first + CHUNK, context)], cache=caches)
        mx.eval([cache.state for cache in caches])
    compact(caches)
    return caches, nats(model, caches, tokens[context : context + TOLD])


def stretch(caches: list[Any]) -> float:
    """Slots of the longest head over tokens of all heads, the mean over layers."""
    rows = [cache.view.rows[0] for cache in caches]
    return sum(row.end for row in rows) / sum(row.end - row.extra_slots for row in rows)


def decode(model: nn.Module, caches: list[Any]) -> float:
    """Milliseconds a token."""
    token = mx.array([[1]])
    started = time.perf_counter()
    for _ in range(DECODED):
        token = model(token, cache=caches)[:, -1].argmax(axis=-1, keepdims=True)
        mx.eval(token)
    return 1e3 * (time.perf_counter() - started) / DECODED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory or a hub id")
    parser.add_argument("--rounds", type=int, default=5, help="turns of decoding")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--texts", type=int, default=len(TEXTS), help="how many of the documents")
    given = parser.parse_args()
    model, tokenizer = load(given.model)[:2]
    root, report = Path(__file__).parent.parent, {}
    texts = [tokenizer.encode((root / text).read_text())[: given.context + TOLD] for text in TEXTS[: given.texts]]
    texts = [mx.array(text) for text in texts if len(text) == given.context + TOLD]
    full = [after(model, text, CachePolicy(), given.context)[1] for text in texts]
    print(
        f"{len(texts)} texts of {given.context:,} tokens, a budget of {given.budget:,}; full cache {full}", flush=True
    )
    for score in SCORES:
        sides: dict[str, Side] = {}
        for name, settings in SIDES.items():
            policy = CachePolicy(budget=given.budget, keep_recent=32, score=score, **settings)
            side = sides[name] = Side([])
            for text, best in zip(texts, full, strict=True):
                side.caches, found = after(model, text, policy, given.context)
                side.lost.append(found - best)
                side.longest.append(stretch(side.caches))
        turns = {name: (lambda side=side: decode(model, side.caches)) for name, side in sides.items()}
        times = {name: sorted(runs)[len(runs) // 2] for name, runs in take_turns(given.rounds, turns).items()}
        base = sides["uniform"].caches
        for name, side in sides.items():
            of_bytes = {
                what: sum(getattr(cache, what) for cache in side.caches) / sum(getattr(cache, what) for cache in base)
                for what in ("nbytes", "nbytes_live")
            }
            row = {
                "nats_lost": sum(side.lost) / len(side.lost),
                "ms": times[name],
                "ms_ratio": times[name] / times["uniform"],
                "longest_over_mean": sum(side.longest) / len(side.longest),
                **of_bytes,
            }
            report[f"{score}, {name}"] = {what: round(number, 4) for what, number in row.items()}
            print(
                f"{score:9} {name:9}", *(f"{what} {number:.3f}" for what, number in row.items()), sep="  ", flush=True
            )
    print(json.dumps({"context": given.context, "budget": given.budget, "texts": len(texts), **report}))


if __name__ == "__main__":
    main()
