"""Throughput of `mlx-kv serve --draft auto` against the same server without drafts, same machine, same model.

    python tools/smollm2.py build/smollm2
    python benchmarks/server_drafts.py [--model build/smollm2] [--clients 8] [--tokens 160] [--rounds 2]

Both servers run as processes of their own and take turns; while one is measured, the other idles. So many clients send
streamed completions at once, greedy, of so many tokens at most: to edit code (a file of some 130 tokens, to be written
again with another name in it) and to talk about something (nothing to be found in the text). Each round has prompts
that no server has seen; both servers get the same. Tokens per second are those of all clients over the wall time,
prompts included.

The physics. A pass of eight rows reads the weights once for all of them, so much of what drafting saves is saved
already; what is left is the arithmetic that a machine has to spare. Drafting pays for rows whose text can be guessed,
and the length is chosen for all rows of a pass together.

Ratios are drafts / none: more than 1, drafting is faster. `same_answers` is the share of prompts to which both gave the
same text. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import count
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv.bundled import model_path
from mlx_kv.mlxlm.loading import load

# isort: split
import httpx
import mlx.core as mx
from common import medians, take_turns
from server import OURS, answers, measure, process
from speculation import CODE, TASKS

TOPICS = (
    "a day at the sea",
    "how bread is made",
    "a walk in the forest",
    "an old town",
    "the first snow",
    "a long journey",
)


def prompts(task: str, number: int, tokenizer: Any) -> str:
    """The prompt of this number, as a text with the chat's marks around it, where the model has any."""
    what = f"title by name{number}" if task == "edit" else f"{TOPICS[number % len(TOPICS)]}, in {number} words"
    question = TASKS[task][0].format(text=CODE.replace("book", f"book{number}"), what=what)
    if getattr(tokenizer, "chat_template", None) is None:
        return question
    asked: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return asked


def drafts(url: str) -> dict[str, Any]:
    told: dict[str, Any] = httpx.get(f"{url}/memory").json().get("drafts") or {}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference", help="a path, or the name of a bundled model")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160, help="of an answer at most: the file to edit is as long")
    parser.add_argument("--rounds", type=int, default=2, help="how often each side is measured")
    given = parser.parse_args()
    line: dict[str, Any] = {"benchmark": "server_drafts", "device": str(mx.default_device()), "clients": given.clients}
    path = model_path(given.model)
    _, tokenizer = load(path)
    numbers = count(100)
    ours = [*OURS, "--model", path]
    with process(ours) as (plain, _), process([*ours, "--draft", "auto"]) as (auto, _):
        for task in ("edit", "open"):
            turns = {"plain": count(), "auto": count()}
            batches = [
                [prompts(task, next(numbers), tokenizer) for _ in range(given.clients)] for _ in range(given.rounds + 1)
            ]

            def turn(side: str, url: str, batches: Any = batches, turns: Any = turns) -> Any:
                return measure(url, side, batches[next(turns[side])], given.clients, given.tokens)

            sides = {"plain": lambda turn=turn: turn("plain", plain), "auto": lambda turn=turn: turn("auto", auto)}
            got = {side: medians(runs)["tokens_per_second"] for side, runs in take_turns(given.rounds, sides).items()}
            line[f"{task}_ratio"] = round(got["auto"] / got["plain"], 3)
            print(
                f"{task}: {got['plain']:.1f} tokens/s without drafts, {got['auto']:.1f} with: {line[f'{task}_ratio']}",
                file=sys.stderr,
                flush=True,
            )
        line["drafts"] = drafts(auto)
    both = [texts for texts in answers.values() if len(texts) == 2]
    line["same_answers"] = round(sum(texts["plain"] == texts["auto"] for texts in both) / len(both), 4)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
