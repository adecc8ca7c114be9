"""Which tokens kvpress keeps: of one checkpoint and one prompt, for each layer and KV head, as JSON.

    python tools/kvpress_kept.py --model build/smollm2 --asked asked.json --out kept.json

It runs in an environment of its own (`pip install torch==2.13.0 kvpress==0.5.5`), and needs neither MLX nor this
package: `benchmarks/kvpress_equality.py` writes what is asked, and compares. What is kept is read off what kvpress
leaves: a press that shortens the cache leaves keys that are rows of those before, one that masks tokens says which.

`asked.json` has `ids` of the prompt, `runs`: [{"press", "ratio", "adaptive", "chunk"}], and of kvzip's second reading
the `instructions`: ids by the text that kvpress has encoded. Of kvzip the scores are kvpress's own, the choice is made
for each head (or by its AdaKV): its own takes the lowest of all layers at once. Decides nothing about budgets.
B = 1 row, H KV heads, n tokens of the prompt, D head dim.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from kvpress import (
    AdaKVPress,
    KeyDiffPress,
    KnormPress,
    KVzipPress,
    ScorerPress,
    SnapKVPress,
    TOVAPress,
)
from kvpress.presses import kvzip_press
from transformers import AutoModelForCausalLM, DynamicCache

PRESSES = {
    "key_diff": KeyDiffPress,
    "key_norm": KnormPress,
    "snap_kv": SnapKVPress,
    "tova": TOVAPress,
}


class Watched:
    """Around a press: what it is given and what it leaves, by layer."""

    def __init__(self, press: Any) -> None:
        self.kept: dict[int, list[list[int]]] = {}
        compress = press.compress

        def watching(module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
            left = compress(module, hidden, keys, values, attentions, kwargs)
            self.kept[module.layer_idx] = kept_in(module, keys, left[0])
            return left

        press.compress = watching


class Given(ScorerPress):  # type: ignore[misc]
    """Keeps by scores that are there already, (L, 1, H, n)."""

    given: torch.Tensor

    def score(self, module: Any, *_: Any) -> torch.Tensor:
        return self.given[module.layer_idx].clone()


def kept_in(module: Any, keys: torch.Tensor, left: torch.Tensor) -> list[list[int]]:
    """The indices of what is left in each head, ascending: of keys (1, H, n, D) after RoPE no two are the same."""
    heads, n = keys.shape[1], keys.shape[2]
    if left.shape[2] == n:
        gone: list[set[int]] = [set() for _ in range(heads)]
        _, of_heads, of_tokens = module.masked_key_indices
        for head, token in zip(of_heads.tolist(), of_tokens.tolist(), strict=True):
            gone[head].add(token)
        return [[token for token in range(n) if token not in gone[head]] for head in range(heads)]
    found = []
    for head in range(heads):
        places = {key.numpy().tobytes(): index for index, key in enumerate(keys[0, head])}
        assert len(places) == n, "two tokens have the same key"
        found.append(sorted(places[key.numpy().tobytes()] for key in left[0, head]))
    return found


class Encoder:
    """In a tokenizer's place: the ids of kvzip's instructions."""

    chat_template = None

    def __init__(self, instructions: dict[str, list[int]]) -> None:
        self.instructions = instructions

    def encode(self, text: str, **_: Any) -> torch.Tensor:
        return torch.tensor([self.instructions.get(text, [])], dtype=torch.long)


@contextlib.contextmanager
def encoded_by(encoder: Encoder) -> Iterator[None]:
    """kvzip asks for the tokenizer of the model's folder; a folder of weights alone has none."""
    before = kvzip_press.AutoTokenizer
    kvzip_press.AutoTokenizer = type("Encoders", (), {"from_pretrained": staticmethod(lambda _: encoder)})
    try:
        yield
    finally:
        kvzip_press.AutoTokenizer = before


def kvzip_scores(model: Any, ids: torch.Tensor, chunk: int, instructions: dict[str, list[int]]) -> torch.Tensor:
    """(L, 1, H, n), with kvpress's own sinks."""
    press = KVzipPress(compression_ratio=0.5, chunk_size=chunk)
    scores: list[torch.Tensor] = []
    choose = press.compress_post

    def post(of: Any) -> None:
        choose(of)
        scores.append(press.score_val.clone())

    press.compress_post = post
    with encoded_by(Encoder(instructions)), press(model):
        model.model(input_ids=ids, past_key_values=DynamicCache())
    return scores[0]


def kept_by(model: Any, ids: torch.Tensor, run: dict[str, Any], instructions: dict[str, list[int]]) -> Any:
    """Of one run, the kept tokens of each layer and head."""
    name, ratio = run["press"], run["ratio"]
    if name == "kvzip":
        press: Any = Given(compression_ratio=ratio)
        press.given = kvzip_scores(model, ids, run["chunk"], instructions)
    else:
        press = PRESSES[name](compression_ratio=ratio)
    if run.get("adaptive"):
        press = AdaKVPress(press)
    watched = Watched(press)
    with press(model):
        model.model(input_ids=ids, past_key_values=DynamicCache())
    return [heads for _, heads in sorted(watched.kept.items())]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder of config.json and model.safetensors")
    parser.add_argument("--asked", required=True, type=Path, help="JSON: ids, instructions, runs")
    parser.add_argument("--out", required=True, type=Path, help="where the kept tokens are written, as JSON")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    asked = json.loads(given.asked.read_text())
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    ids = torch.tensor([asked["ids"]], dtype=torch.long)
    kept = [kept_by(model, ids, run, asked["instructions"]) for run in asked["runs"]]
    given.out.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
