"""The same commands alone and on several ranks: whether they say the same, on a real checkpoint.

    python benchmarks/ranks_equal.py --model build/smollm2 [--ranks 3] [--tokens 48] [--splits heads]

Ranks are processes of this machine. Each case is `mlx-kv generate` with other options, alone, and then on all ranks, in
each way in which the model can be split (mlx-lm splits llama's heads, not its layers): plain, 8 bits, a ring, budgets
of every share, sampled, drafts from the text. The prompt is this repository's own source, long enough that every budget
and ring is full. Said is for each case whether the text is the same to the last character, and of one that is not how
many characters are. Quantised keys may differ in the last bit, since a sum over ranks is added in another order, and so
may a text where two tokens are nearly as likely. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "ranks")]

from launching import MLX_KV, run_ranks, succeeded  # noqa: E402

PROMPT = "".join((ROOT / "mlx_kv" / "cache" / "growth.py").read_text().splitlines(keepends=True)[:60])
BUDGET = ("--kv-budget", "256", "--kv-keep-recent", "32", "--kv-margin", "32")
CASES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "8 bits": ("--kv-bits", "8"),
    "ring": ("--max-kv-size", "200"),
    "budget, layers": BUDGET,
    "budget, layer": (*BUDGET, "--kv-share", "layer"),
    "budget, head": (*BUDGET, "--kv-share", "head"),
    "budget, 8 bits": (*BUDGET, "--kv-bits", "8"),
    "sampled": ("--temp", "0.8", "--top-p", "0.9", "--seed", "3"),
    "drafts": ("--draft", "suffix"),
    "drafts, budget": ("--draft", "suffix", *BUDGET),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory, or the name of a bundled model")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--splits", default="heads", help="heads, layers, or both: heads,layers")
    arguments = parser.parse_args()
    model = str(Path(arguments.model).resolve()) if Path(arguments.model).exists() else arguments.model
    told = []
    for name, options in CASES.items():
        words = (*MLX_KV, "generate", "--model", model, "--ignore-chat-template", "--prompt", PROMPT, *options)
        words = (*words, "--max-tokens", str(arguments.tokens))
        one = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        ).stdout
        for split in arguments.splits.split(","):
            several = succeeded(run_ranks(arguments.ranks, (*words, "--split", split), timeout=600))[0].stdout
            alike = next((i for i, (a, b) in enumerate(zip(one, several, strict=False)) if a != b), None)
            told.append({"case": name, "split": split, "same": one == several, "characters": len(one)})
            if one != several:
                told[-1]["alike"] = min(len(one), len(several)) if alike is None else alike
            print(f"{name:16} {split:6} {'the same' if one == several else told[-1]}", flush=True)
    same = sum(bool(each["same"]) for each in told)
    print(json.dumps({"ranks": arguments.ranks, "cases": len(told), "same": same, "told": told}))


if __name__ == "__main__":
    main()
