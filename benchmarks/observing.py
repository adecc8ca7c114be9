"""What it costs to look at attention: each score that does against key_diff, which looks at keys alone.

    python benchmarks/observing.py --model build/smollm2 [--tokens 4096] [--budget 2048] [--decoded 300] [--long 8192]
    python benchmarks/observing.py --model build/smollm2 --calibration build/smollm2.kvcal.safetensors

With --calibration: what the fitted score costs against key_diff under the same allocation, and both against key_diff
with the same tokens in all layers. fitted undoes RoPE and multiplies F features of each token by H weights, once;
key_diff reads all keys twice at each compaction.

The physics. A prompt is read in chunks of 512, and compacted to the budget before each chunk once it is over it; then
tokens are decoded one by one, and compacted every margin (128) of them. snap_kv and tova copy the last 128 and 65
queries of each chunk, and of a step keep what is there anyway; at a compaction 64 queries, or one, meet all keys: of
n keys that is 64 n D multiplications for each query head, and as many exponentials by 64 n. key_diff reads all keys
twice at a compaction instead.

All scores read the same chunk, and decode the same step, in turns: a machine that slows down does so for all. Where
others use it, too, seconds of processors (cpu) say more than those of the clock. Ratios are score / key_diff, less is
better. Then the peak of memory while a prompt of --long tokens is read, weights left out, each score alone. One line
a measurement, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import CachePolicy, Calibration, load_calibration, make_prompt_cache
from mlx_kv.generation.prefill import read_chunk
from mlx_kv.mlxlm.loading import load

# isort: split
import mlx.core as mx

SCORES = ("key_diff", "snap_kv", "tova")
CHUNK = 512


def policies(budget: int, calibration: Calibration | None) -> dict[str, CachePolicy]:
    """What is compared, the base of all ratios first."""
    if calibration is None:
        return {score: CachePolicy(budget=budget, score=score) for score in SCORES}
    return {
        "key_diff": CachePolicy(budget=budget, score="key_diff", calibration=calibration),
        "fitted": CachePolicy(budget=budget, calibration=calibration),
        "key_diff, same tokens in all layers": CachePolicy(budget=budget),
    }


def prompt(model: Any, tokens: int) -> mx.array:
    return mx.random.randint(0, model.args.vocab_size, (1, tokens), key=mx.random.key(1))


def read_and_decode(
    model: Any, tokens: int, compared: dict[str, CachePolicy], decoded: int
) -> dict[str, dict[str, float]]:
    """Seconds that each score takes to read a prompt, and to decode after it: of the clock, and of processors."""
    text, caches = prompt(model, tokens), {name: make_prompt_cache(model, each) for name, each in compared.items()}
    warming = make_prompt_cache(model, compared["key_diff"])
    read_chunk(model, warming, text[:, :CHUNK])  # kernels are made, memory is found
    seconds = {what: dict.fromkeys(compared, 0.0) for what in ("prefill", "decode", "prefill_cpu", "decode_cpu")}

    def count(what: str, score: str, work: Callable[[], object]) -> None:
        began, used = time.perf_counter(), time.process_time()
        work()
        seconds[what][score] += time.perf_counter() - began
        seconds[f"{what}_cpu"][score] += time.process_time() - used

    for number, first in enumerate(range(0, tokens, CHUNK)):
        for score in turned(list(compared), number):
            count("prefill", score, partial(read_chunk, model, caches[score], text[:, first : first + CHUNK]))
    for number in range(decoded):
        for score in turned(list(compared), number):
            count("decode", score, partial(decode, model, caches[score], text[:, number : number + 1]))
    return seconds


def decode(model: Any, caches: list[Any], token: mx.array) -> None:
    mx.eval(model(token, cache=caches))


def turned(names: list[str], number: int) -> list[str]:
    """The names, each time another one first."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def peaks(model: Any, tokens: int, compared: dict[str, CachePolicy]) -> dict[str, int]:
    """Bytes at the peak while a prompt is read, beyond what the model takes."""
    text, found = prompt(model, tokens), {}
    for score, policy in compared.items():
        mx.clear_cache()
        before, own = mx.get_active_memory(), make_prompt_cache(model, policy)
        mx.reset_peak_memory()
        for first in range(0, tokens, CHUNK):
            read_chunk(model, own, text[:, first : first + CHUNK])
        found[score] = mx.get_peak_memory() - before
        del own
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    for name, default in (("tokens", 4096), ("budget", 2048), ("decoded", 300), ("long", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--calibration", help="FILE of mlx-kv calibrate")
    asked = parser.parse_args()
    model, _ = load(asked.model)
    calibration = None if asked.calibration is None else load_calibration(asked.calibration, model)
    compared = policies(asked.budget, calibration)
    results: dict[str, Any] = {"tokens": asked.tokens, "budget": asked.budget}
    for what, seconds in read_and_decode(model, asked.tokens, compared, asked.decoded).items():
        results[what] = {score: round(own / seconds["key_diff"], 4) for score, own in seconds.items()}
        results[f"{what}_seconds"] = {score: round(own, 3) for score, own in seconds.items()}
        print(what, ", ".join(f"{score} {ratio:.3f}" for score, ratio in results[what].items()), flush=True)
    if asked.long:
        found = peaks(model, asked.long, compared)
        results["peak"] = {score: round(own / found["key_diff"], 4) for score, own in found.items()}
        results["peak_bytes"] = found
        print("peak", ", ".join(f"{score} {ratio:.3f}" for score, ratio in results["peak"].items()), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
