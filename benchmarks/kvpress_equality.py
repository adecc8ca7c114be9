"""Whether our scores keep the tokens that kvpress keeps: same weights, same prompt, same budget, head by head.

    python benchmarks/kvpress_equality.py --kvpress-python PATH --model build/smollm2 [--tokens 1024] [--runs tova]

PATH is the Python of an environment of its own with `pip install torch==2.13.0 kvpress==0.5.5`: there
`tools/kvpress_kept.py` reads the checkpoint and says what kvpress keeps. Here ours reads the same ids in one go, and is
compacted once, with as many tokens protected as the press protects. Compared on the checkpoint and on a tiny random
llama, which is written for it. Two implementations in float32 add in another order, so a token may change places with
another of nearly the same score: of all tokens that differ, we say how far our score of them lies from the least that
was kept, as a share of the scores' spread in that head. Where heads or layers differ in length, so are they counted.

No speed is measured. One line a run, and one JSON line last: the share of equal tokens, of all and in the worst head.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, get_args

from mlx_kv import CachePolicy, compact, make_prompt_cache
from mlx_kv.cache.eviction.allocation import Scope
from mlx_kv.cache.eviction.scores import score_names
from mlx_kv.mlxlm.loading import load
from mlx_kv.mlxlm.traverse import attention_caches

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
HERE = Path(__file__).parent.parent
TEXT = HERE / "docs/architecture.md"
CHUNK = 400  # of kvzip: several of them
LEAST = 0.99  # of the tokens of a run must be equal
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Run(NamedTuple):
    """One comparison.

    Attributes:
        press: as `tools/kvpress_kept.py` calls it.
        score: ours.
        recent, sinks: tokens that the press protects.
        share: of our policy.
    """

    press: str
    score: str
    recent: int = 0
    sinks: int = 0
    share: str = "head"

    @property
    def name(self) -> str:
        return self.press + (", adaptive" if self.share == "adaptive" else "")


RUNS = (
    Run("key_diff", "key_diff"),
    Run("key_norm", "key_norm"),
    Run("snap_kv", "snap_kv", recent=64),
    Run("tova", "tova", recent=1),
    Run("kvzip", "kvzip", sinks=4),
    Run("snap_kv", "snap_kv", recent=64, share="adaptive"),
    Run("kvzip", "kvzip", sinks=4, share="adaptive"),
)


def why_not(run: Run) -> str | None:
    if run.score not in score_names():
        return f"there is no score {run.score!r} here"
    if run.share not in get_args(Scope):
        return f"there is no share={run.share!r} here"
    return None


def kept_here(model: Any, ids: list[int], run: Run, ratio: float, instructions: dict[str, list[int]]) -> Any:
    """The kept positions by layer and head, ascending, and our scores of all tokens, (H, n) of each layer."""
    budget = max(1, int(len(ids) * (1 - ratio)))
    policy = CachePolicy(
        budget=budget,
        score=run.score,
        share=run.share,  # type: ignore[arg-type]
        keep_recent=run.recent,
        sinks=run.sinks,
        margin=2 * len(ids),
        max_write=len(ids),
    )
    caches = make_prompt_cache(model, policy)
    if run.score == "kvzip":
        from mlx_kv.generation.prefill import Instructions, TwoPassPrefill

        asked = Instructions(tuple(instructions[FIRST]), tuple(instructions[LATER]), tuple(instructions["\n"]))
        TwoPassPrefill(model, caches, [ids], len(ids), asked, chunk=CHUNK).finish()
    else:
        model(mx.array([ids]), cache=caches)
        mx.eval([cache.state for cache in caches])
    layers = list(attention_caches(caches))
    scores = [np.array(cache.evictor.live_scores(0)) for cache in layers]
    compact(caches)
    kept = []
    for cache in layers:
        positions = cache.positions
        heads = positions if isinstance(positions, list) else list(positions[0])
        kept.append([sorted(int(p) for p in np.array(head).reshape(-1) if p >= 0) for head in heads])
    return kept, scores


class Found(NamedTuple):
    """Attributes:
    equal: tokens kept by both, of those that kvpress keeps.
    worst: the same, in the worst head.
    farthest: how far from the border a token lies that differs, as a share of the spread of scores; 0 where none does.
    """

    equal: float
    worst: float
    farthest: float


def compared(theirs: Any, ours: Any, scores: list[np.ndarray]) -> Found:
    both = total = 0
    worst, farthest = 1.0, 0.0
    for layer, (they, we) in enumerate(zip(theirs, ours, strict=True)):
        for head, (a, b) in enumerate(zip(they, we, strict=True)):
            first, second = set(a), set(b)
            same = len(first & second)
            both, total, worst = both + same, total + max(len(a), len(b)), min(worst, same / max(1, len(a), len(b)))
            of_head = scores[layer][min(head, len(scores[layer]) - 1)].astype(np.float64)
            spread = np.percentile(of_head, 99) - np.percentile(of_head, 1)
            border = min((of_head[token] for token in second), default=0.0)
            for token in first ^ second:
                farthest = max(farthest, abs(of_head[token] - border) / max(spread, 1e-30))
    return Found(both / max(1, total), worst, farthest)


def kept_there(python: str, folder: Path, asked: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as scratch:
        asking, told = Path(scratch) / "asked.json", Path(scratch) / "kept.json"
        asking.write_text(json.dumps(asked))
        tool = HERE / "tools/kvpress_kept.py"
        command = [python, str(tool), "--model", str(folder), "--asked", str(asking), "--out", str(told)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"kvpress could not be asked: {done.stderr.strip().splitlines()[-1:]}")
        return json.loads(told.read_text())


def tiny_llama(folder: Path) -> Any:
    """A random llama of mlx-lm, written as a checkpoint that both sides read."""
    mx.random.seed(1)
    model = llama.Model(llama.ModelArgs.from_dict(TINY))
    weights = {name: 3.0 * x if x.ndim == 2 else x for name, x in tree_flatten(model.parameters())}
    model.load_weights(list(weights.items()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(TINY))
    return model


def compare(
    name: str, model: Any, folder: Path, ids: list[int], words: dict[str, list[int]], given: argparse.Namespace
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    runs = []
    for run in RUNS:
        if given.runs and run.press not in given.runs:
            continue
        if (why := why_not(run)) is not None:
            print(f"{name}, {run.name}: left out, {why}")
            continue
        runs += [(run, ratio) for ratio in given.ratios]
    asked = [
        {"press": run.press, "ratio": ratio, "adaptive": run.share == "adaptive", "chunk": CHUNK} for run, ratio in runs
    ]
    there = kept_there(given.kvpress_python, folder, {"ids": ids, "instructions": words, "runs": asked})
    for (run, ratio), theirs in zip(runs, there, strict=True):
        found = compared(theirs, *kept_here(model, ids, run, ratio, words))
        results[f"{run.name}, {ratio:.3g}"] = found._asdict()
        print(
            f"{name}, {run.name}, {ratio:.3g} evicted: {found.equal:.3%} equal, {found.worst:.2%} in the worst head; "
            f"what differs lies within {found.farthest:.1e} of the border",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvpress-python", required=True, help="the Python of an environment that has kvpress")
    parser.add_argument("--model", type=Path, help="a checkpoint, float32; without one, the tiny llama alone")
    parser.add_argument("--tokens", type=int, default=1024, help="of the prompt")
    parser.add_argument("--ratios", default="0.5,0.75", help="shares of the tokens that are evicted")
    parser.add_argument("--runs", default="", help="names of presses, with commas; all of them")
    given = parser.parse_args()
    given.ratios = [float(ratio) for ratio in given.ratios.split(",")]
    given.runs = [run for run in given.runs.split(",") if run]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = tiny_llama(folder)
        ids = np.random.default_rng(0).integers(3, TINY["vocab_size"], given.tokens).tolist()  # type: ignore[arg-type]
        words = {FIRST: [5, 6, 7, 8, 9], LATER: [5, 6, 10, 11], "\n": [12]}
        results["tiny llama"] = compare("tiny llama", model, folder, ids, words, given)
    if given.model is not None:
        model, tokenizer = load(str(given.model))
        ids = tokenizer.encode(TEXT.read_text())[: given.tokens]
        words = {text: tokenizer.encode(text, add_special_tokens=False) for text in (FIRST, LATER, "\n")}
        results[given.model.name] = compare(given.model.name, model, given.model, ids, words, given)
    worst = min((found["equal"] for runs in results.values() for found in runs.values()), default=1.0)
    print(json.dumps({"results": results, "least_equal": worst, "enough": worst >= LEAST}))


if __name__ == "__main__":
    main()
