"""One fact in a real file, its question at the end: is it answered when a budget keeps a fifth of the tokens?

    python tools/smollm2.py build/smollm2
    mlx-kv calibrate build/smollm2
    python benchmarks/file_questions.py --model build/smollm2 [--file FILE] [--budget 512] [--places 6]

The fact stands at several places of the file, one prompt for each. A prompt is read in chunks and compacted on the way,
as `mlx-kv generate --kv-budget` does, so tokens are evicted long before the question is seen. Compared are the full
cache, what --kv-budget means without a calibration and with one, and parts of the difference. An answer is right if it
has the number of the fact.

The physics: the full cache reads all tokens once; a budget of B attends to at most B + margin + chunk of them. One
JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
import mlx_kv
from mlx_kv import CachePolicy
from mlx_kv.files.calibration_file import find_calibration

FACT = "The telephone number of the night desk is 4917."
QUESTION = "What is the telephone number of the night desk?"
ANSWER = "4917"
FILE = Path(__file__).with_suffix(".txt")  # frozen, so that figures can be measured again: an older SECURITY.md


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--places", type=int, default=6)
    parser.add_argument("--policies", type=lambda text: text.split(","))
    chosen = parser.parse_args()

    model, tokenizer = mlx_kv.load(chosen.model)
    calibration = find_calibration(chosen.model, model)
    if calibration is None:
        parser.error(f"no calibration of {chosen.model}: run mlx-kv calibrate {chosen.model}")
    budget = chosen.budget
    policies = {
        "full cache": CachePolicy(),
        "without a calibration": CachePolicy(budget=budget),
        "key_diff, adaptive": CachePolicy(budget=budget, share="adaptive"),
        "key_diff, calibrated": CachePolicy(budget=budget, score="key_diff", calibration=calibration),
        "fitted, uniform": CachePolicy(budget=budget, share="head", layers="uniform", calibration=calibration),
        "with a calibration": CachePolicy(budget=budget, calibration=calibration),
    }
    policies = {name: policy for name, policy in policies.items() if name in (chosen.policies or policies)}
    lines = chosen.file.read_text(encoding="utf-8").splitlines()
    right = dict.fromkeys(policies, 0)
    seconds: dict[str, list[float]] = {name: [] for name in policies}
    tokens = 0
    for place in range(chosen.places):
        at = round(len(lines) * (place + 0.5) / chosen.places)
        text = "\n".join([*lines[:at], FACT, *lines[at:]])
        chat = [{"role": "user", "content": f"{text}\n\n{QUESTION}"}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        tokens = len(prompt)
        for name, policy in policies.items():
            begun = time.perf_counter()
            answer = mlx_kv.generate(model, tokenizer, prompt, max_tokens=24, policy=policy)
            seconds[name].append(time.perf_counter() - begun)
            right[name] += ANSWER in answer
            print(f"line {at} of {len(lines)}, {tokens} tokens, {name}: {answer.strip()[:70]!r}", flush=True)
    found = {name: {"right": right[name], "seconds": round(statistics.median(seconds[name]), 1)} for name in policies}
    print(json.dumps({"file": chosen.file.name, "tokens": tokens, "budget": budget, "of": chosen.places, **found}))


if __name__ == "__main__":
    main()
