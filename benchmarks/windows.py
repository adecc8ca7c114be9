"""Sliding windows of a real model: what goes back, what is reused and what drafts get, beyond a window.

    python tools/gemma3.py build/gemma3
    python benchmarks/windows.py --model build/gemma3 [--tokens 1500] [--answer 96]

The physics. 15 of Gemma 3 270M's 18 layers see 512 tokens, so most of a prompt is overwritten while it is read, and
nothing restores it: a prompt that leaves the text of another one is reused up to there only where all that layers see
from there on is still stored. A token of a layer takes 2 x 256 x 4 bytes in float32.

The text is source code of Python's library. Read are its first --tokens; the answer is greedy. Parts:

- answers: tokens of the answer before the first one that differs from mlx-lm's own caches, and bytes of the caches
  then: allocated, and of the tokens that they keep.
- rollback: how many of the last tokens are trimmed, then read again; the largest difference of the next logits from
  those of a run without a trim, of logits that span tens.
- reuse: tokens of a cached prompt that the next one reuses: one that goes on, one whose last 20 tokens differ, one that
  differs from its middle on; and the bytes that are kept for it. mlx-lm's is `LRUPromptCache`, which has what it is
  given: the caches at the end of the prompt. `PromptMemory` also has some on the way.
- drafts: code and its beginning again, continued with `suffix`: share of drafted tokens accepted, and tokens a pass.

It measures no times. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import argparse as source
import copy
import inspect
import json
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import (
    CachePolicy,
    PromptMemory,
    PromptReader,
    SpeculationStatistics,
    cache_statistics,
    load,
    make_prompt_cache,
    speculative_generate,
    trim_prompt_cache,
)

# isort: split
import mlx.core as mx
from mlx_lm.models import cache as stock

CHUNK = 128
CHANGED = 20  # last tokens of a prompt that another one does not have


def read(model: Any, caches: list[Any], tokens: list[int]) -> mx.array:
    """Reads tokens in chunks; returns the logits (V,) of what comes next, the only ones that are computed."""
    for first in range(0, len(tokens) - 1, CHUNK):
        model(mx.array([tokens[first : min(first + CHUNK, len(tokens) - 1)]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    logits = model(mx.array([tokens[-1:]]), cache=caches)[0, -1]
    mx.eval(logits)
    return logits


def answer(model: Any, caches: list[Any], tokens: list[int], count: int) -> list[int]:
    said: list[int] = []
    logits = read(model, caches, tokens)
    for _ in range(count):
        said.append(int(mx.argmax(logits).item()))
        logits = read(model, caches, said[-1:])
    return said


def same(one: list[int], other: list[int]) -> int:
    """How many tokens are the same before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def answers(model: Any, tokens: list[int], count: int) -> dict[str, Any]:
    sides = {
        "mlx-lm": stock.make_prompt_cache(model),
        "ours": make_prompt_cache(model),
        "ours, 8 bits": make_prompt_cache(model, CachePolicy(bits=8)),
        "ours, 4 bits": make_prompt_cache(model, CachePolicy(bits=4)),
        "ours, max_rollback=32": make_prompt_cache(model, CachePolicy(max_rollback=32)),
    }
    texts = {name: answer(model, caches, tokens, count) for name, caches in sides.items()}
    return {
        name: {
            "same": same(texts[name], texts["mlx-lm"]),
            "bytes": sum(cache.nbytes for cache in caches),
            "live": cache_statistics(caches).bytes_live if name.startswith("ours") else None,
        }
        for name, caches in sides.items()
    }


def rollback(model: Any, tokens: list[int]) -> dict[str, Any]:
    """Tokens that each side trimmed of those that it was to, and how far the next logits are off."""
    found: dict[str, Any] = {}
    wanted = read(model, stock.make_prompt_cache(model), tokens)
    for name, policy in {
        "mlx-lm": None,
        "ours": CachePolicy(),
        "max_rollback=32": CachePolicy(max_rollback=32),
    }.items():
        once = stock.make_prompt_cache(model) if policy is None else make_prompt_cache(model, policy)
        read(model, once, tokens[:-64])
        for token in tokens[-64:]:  # as in decoding: a ring has shrunk since the prompt
            read(model, once, [token])
        for count in (1, 32):
            caches = copy.deepcopy(once)
            trim = stock.trim_prompt_cache if policy is None else trim_prompt_cache
            trimmed = trim(caches, count)
            off = mx.abs(read(model, caches, tokens[-trimmed:]) - wanted).max().item() if trimmed else None
            found[f"{name}, {count}"] = {"trimmed": trimmed, "off": off}
    return found


def reuse(model: Any, tokens: list[int], more: list[int]) -> dict[str, Any]:
    """Tokens of each next prompt that need not be read."""
    nexts = {
        "goes on": [*tokens, *more],
        "end differs": [*tokens[:-CHANGED], *more],
        "middle differs": [*tokens[: len(tokens) // 2], *more],
    }
    theirs = stock.LRUPromptCache()
    caches = stock.make_prompt_cache(model)
    read(model, caches, tokens)
    theirs.insert_cache("model", tokens, caches)
    found = {
        name: {"mlx-lm": len(text) - len(theirs.fetch_nearest_cache("model", text)[1])} for name, text in nexts.items()
    }
    for side, policy in {"ours": CachePolicy(), "max_rollback=32": CachePolicy(max_rollback=32)}.items():
        memory = PromptMemory(2**32)
        PromptReader(model, make_prompt_cache(model, policy), [*tokens, more[0]], memory).finish()
        for name, text in nexts.items():
            found[name][side] = PromptReader(model, make_prompt_cache(model, policy), text, memory).reused
        found["bytes"] = found.get("bytes", {"mlx-lm": theirs.nbytes}) | {side: memory.nbytes}
    return found


def drafts(model: Any, tokens: list[int], count: int) -> dict[str, Any]:
    prompt = [*tokens, *tokens[1 : len(tokens) // 3]]
    plain = answer(model, make_prompt_cache(model), prompt, count)
    statistics = SpeculationStatistics()
    made = speculative_generate(
        model, None, None, prompt, count, drafter="suffix", draft_length="fixed", statistics=statistics
    )
    text = [response.token for response in made]
    return {
        "same": same(text, plain),
        "of": count,
        "drafted": statistics.drafted,
        "accepted": statistics.accepted,
        "tokens_a_pass": statistics.tokens / statistics.rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model with windows, such as tools/gemma3.py makes")
    parser.add_argument("--tokens", type=int, default=1500, help="of the prompt")
    parser.add_argument("--answer", type=int, default=96, help="tokens")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model)
    everything = tokenizer.encode(inspect.getsource(source))
    tokens, more = everything[: arguments.tokens], everything[-200:]
    report = {
        "answers": answers(model, tokens, arguments.answer),
        "rollback": rollback(model, tokens),
        "reuse": reuse(model, tokens, more),
        "drafts": drafts(model, tokens, arguments.answer),
    }
    for part, found in report.items():
        print(f"{part}:", *(f"  {name}: {each}" for name, each in found.items()), sep="\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
