"""What it costs to keep rows to a grammar.

    python benchmarks/structured.py [--model PATH] [--rows 1,8] [--tokens 60] [--rounds 3]

Each token of a row that is kept to a grammar waits for the one before it: only when that is known can the library
say which tokens may come next, one bit for each token of the vocabulary. Then the mask is made an array, and logits
that are not allowed become minus infinity. So a pass is no longer begun before the last one's tokens are known, and
each row costs what its masks cost. Both are measured: tokens a second of rows with and without a grammar, greedy,
alternating, in the same process; and microseconds of a single mask, without a model. The schema is a list of objects
without an end, so that all rows go on for as long. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import mlx_kv  # noqa: F401  (first: it chooses the BLAS)
from mlx_kv.bundled import model_path
from mlx_kv.generation.engine import EngineSettings, make_engine
from mlx_kv.generation.grammar import Grammar, GrammarCompiler, json_schema
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.mlxlm.loading import load

PROMPT = "A list of people, each with a name, an age and friends:\n"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "friends": {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z]{1,12}$"}, "maxItems": 3},
    },
    "required": ["name", "age", "friends"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}


def speed(model: Any, tokenizer: Any, grammar: Grammar | None, rows: int, tokens: int) -> tuple[float, list[int]]:
    """Tokens a second of all rows, after their prompts, and those of the first."""
    engine = make_engine(model, set(tokenizer.eos_token_ids), settings=EngineSettings(rows))
    prompt = [int(token) for token in tokenizer.encode(PROMPT)]
    for row in range(rows):
        processors = () if grammar is None else (grammar.processor(len(prompt)),)
        engine.submit(TokenSequence(row, prompt, tokens, processors=processors))
    first: list[int] = []
    generated, started = 0, None
    while engine.busy:
        step = engine.step()
        if started is None:
            started = time.perf_counter() if len(step) == rows else None
            generated -= len(step)
        generated += len(step)
        first += [token.token for token in step if token.index == 0]
    seconds = time.perf_counter() - (started or 0.0)
    engine.close()
    return generated / seconds, first


def mask_microseconds(compiler: GrammarCompiler, answer: list[int], vocabulary: int) -> list[float]:
    """What the mask at each place of an answer takes, with what it takes to get there."""
    import mlx.core as mx

    processor, logits, taken = compiler.compile(json_schema(SCHEMA)).processor(0), mx.zeros((1, vocabulary)), []
    for place in range(len(answer)):
        shown = mx.array(answer[:place], dtype=mx.int32)
        mx.eval(shown, logits)
        started = time.perf_counter()
        mx.eval(processor(shown, logits))
        taken.append(1e6 * (time.perf_counter() - started))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="reference")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model, tokenizer = load(model_path(options.model))
    compiler = GrammarCompiler(tokenizer)
    compiling = []
    for _ in range(2):  # the first makes the vocabulary, too
        started = time.perf_counter()
        compiler.compile(json_schema(SCHEMA | {"title": str(len(compiling))}))
        compiling.append(time.perf_counter() - started)
    grammar = compiler.compile(json_schema(SCHEMA))
    found: dict[str, Any] = {
        "model": options.model,
        "vocabulary_seconds": round(compiling[0], 3),
        "compile_milliseconds": round(1e3 * compiling[1], 2),
    }
    answer: list[int] = []
    for rows in [int(each) for each in options.rows.split(",")]:
        free, kept = [], []
        for _ in range(options.rounds):
            free.append(speed(model, tokenizer, None, rows, options.tokens)[0])
            tokens_a_second, answer = speed(model, tokenizer, grammar, rows, options.tokens)
            kept.append(tokens_a_second)
        ratio = statistics.median(own / other for own, other in zip(kept, free, strict=True))
        print(
            f"{rows} rows: {statistics.median(free):.1f} tokens/s free, {statistics.median(kept):.1f} kept, {ratio:.2f}"
        )
        found[f"rows_{rows}"] = {"free": statistics.median(free), "kept": statistics.median(kept), "ratio": ratio}
    masks = sorted(mask_microseconds(compiler, answer, len(tokenizer)))
    found |= {"mask_microseconds": statistics.median(masks), "mask_microseconds_99th": masks[int(0.99 * len(masks))]}
    print(repr(tokenizer.decode(answer))[:300])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
