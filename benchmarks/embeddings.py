"""Embeddings: tokens per second and vectors, against the same model in mlx-lm, one text after the other.

    python benchmarks/embeddings.py --model build/smollm2 --inputs 100

Texts of 150 to 250 random tokens; both sides take turns, 20 texts each. mlx-lm's side is its inner model and the last
token's state, which is all that there is to do. Largest difference of a number of two vectors of a text. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv.bundled import model_path
from mlx_kv.generation.embedding import Embedder

# isort: split
import mlx.core as mx

from mlx_kv.mlxlm.loading import load, vocabulary_of

TURN = 20  # texts


def ours(embedder: Embedder, texts: list[list[int]]) -> list[mx.array]:
    passes = embedder.embed(texts, "last")
    while True:
        try:
            next(passes)
        except StopIteration as ended:
            vectors: list[mx.array] = ended.value
            return vectors


def theirs(model: Any, texts: list[list[int]]) -> list[mx.array]:
    vectors = []
    for tokens in texts:
        state = model.model(mx.array([tokens]))[0, -1]
        vectors.append(state / mx.linalg.norm(state))
        mx.eval(vectors[-1])
    return vectors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference", help="a model directory, or a bundled one")
    parser.add_argument("--inputs", type=int, default=1_000)
    arguments = parser.parse_args()
    model, _ = load(model_path(arguments.model))
    embedder, draw, vocabulary = Embedder(model), random.Random(0), vocabulary_of(model)
    texts = [[draw.randrange(vocabulary) for _ in range(draw.randrange(150, 251))] for _ in range(arguments.inputs)]
    seconds, largest = {"ours": 0.0, "mlx_lm": 0.0}, 0.0
    ours(embedder, texts[:2])
    theirs(model, texts[:2])
    for first in range(0, len(texts), TURN):
        some, found = texts[first : first + TURN], {}
        for name, run in (("ours", lambda: ours(embedder, some)), ("mlx_lm", lambda: theirs(model, some))):  # noqa: B023
            started = time.perf_counter()
            found[name] = run()
            seconds[name] += time.perf_counter() - started
        pairs = zip(found["ours"], found["mlx_lm"], strict=True)
        largest = max([largest, *(float(mx.abs(one - other).max()) for one, other in pairs)])
    tokens = sum(map(len, texts))
    rates = {name: round(tokens / each, 1) for name, each in seconds.items()}
    ratio = round(seconds["mlx_lm"] / seconds["ours"], 3)
    print(f"{len(texts)} texts, tokens/s: {rates}, ratio {ratio}, largest difference {largest:.1e}")
    print(json.dumps({"benchmark": "embeddings", "inputs": len(texts), **rates, "ratio": ratio, "difference": largest}))


if __name__ == "__main__":
    main()
