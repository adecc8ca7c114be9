"""How large a model must be for a draft model to pay, and how small the draft: what passes cost, by size.

    python benchmarks/draft_sizes.py [--rounds 5] [--chances 0.829,0.809,0.809]

A round of K drafted tokens takes K passes of the draft, each a token, and one pass of the model over K + 1. It gives
one token, and the drafted ones up to the first that is wrong. So with chances c1, c2, ... that a token is right if
those before it are,

    gain = (1 + c1 + c1 c2 + ...) * token of the model / (K * token of the draft + pass of K + 1 tokens)

and the most that any draft could give is what is left where its tokens cost nothing. The chances are those of the
bundled draft on held-out source unless others are given; whether a smaller draft has them, or a larger model's are as
high, is not said here: only what passes cost is measured, with random weights of the shape of the bundled models, after
256 tokens, each step begun before the last one is known. All sizes take turns in one process. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import CachePolicy, make_prompt_cache, model_path, trim_prompt_cache
from mlx_kv.mlxlm.loading import model_from_config

# isort: split
import mlx.core as mx
from common import medians, take_turns

STEPS = 24
DRAFTS = {"draft, 2 layers": ("draft", 2), "draft, 1 layer": ("draft", 1)}
MODELS = {f"model, {layers} layers": ("reference", layers) for layers in (4, 6, 8, 12, 16)}


def made(bundled: str, layers: int) -> Any:
    config = json.loads(Path(model_path(bundled), "config.json").read_text()) | {"num_hidden_layers": layers}
    model = model_from_config(config, mx.float32)
    mx.eval(model.parameters())
    return model


class Passes:
    """The passes of one model, after 256 tokens."""

    def __init__(self, model: Any) -> None:
        self.model, self.caches = model, make_prompt_cache(model, CachePolicy(reserve=512))
        self.ids = mx.random.randint(1, 4096, (1, 256), key=mx.random.key(0))
        mx.eval(model(self.ids, cache=self.caches))

    def token(self) -> float:
        """Seconds of a token, where the next begins before it is known."""
        said = self.ids[:, :1]
        started = time.perf_counter()
        for _ in range(STEPS):
            said = mx.argmax(self.model(said, cache=self.caches)[:, -1], axis=-1)[:, None]
            mx.async_eval(said)
        mx.eval(said)
        seconds = time.perf_counter() - started
        trim_prompt_cache(self.caches, STEPS, strict=True)
        return seconds / STEPS

    def together(self, tokens: int) -> float:
        """Seconds of a pass over so many, that is waited for."""
        started = time.perf_counter()
        for _ in range(STEPS // 4):
            mx.eval(mx.argmax(self.model(self.ids[:, :tokens], cache=self.caches), axis=-1))
            trim_prompt_cache(self.caches, tokens, strict=True)
        return (time.perf_counter() - started) / (STEPS // 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each size is measured")
    parser.add_argument("--chances", default="0.829,0.809,0.809", help="that each drafted token is right")
    given = parser.parse_args()
    chances = [float(chance) for chance in given.chances.split(",")]
    count, tokens = len(chances), 1 + sum(accumulate(chances, mul))
    passes = {name: Passes(made(*size)) for name, size in (DRAFTS | MODELS).items()}
    runs = take_turns(
        given.rounds,
        {name: lambda own=own: {"token": own.token(), "pass": own.together(count + 1)} for name, own in passes.items()},
    )
    costs = {name: medians(each) for name, each in runs.items()}
    line: dict[str, Any] = {"benchmark": "draft_sizes", "device": str(mx.default_device()), "tokens": round(tokens, 2)}
    line["seconds"] = {name: {what: round(each, 6) for what, each in own.items()} for name, own in costs.items()}
    for name in MODELS:
        model = costs[name]
        gains = {
            draft: tokens * model["token"] / (count * costs[draft]["token"] + model["pass"]) for draft in DRAFTS
        } | {"a draft that costs nothing": tokens * model["token"] / model["pass"]}
        line[name] = {draft: round(gain, 2) for draft, gain in gains.items()}
        told = ", ".join(f"{gain:.2f} with {draft}" for draft, gain in gains.items())
        print(f"{name}: {1000 * model['token']:.1f} ms a token; {told}", file=sys.stderr)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
