"""Throughput and time to first token of `mlx-kv serve` against `mlx_lm.server`, same machine, same model.

    python benchmarks/server.py [--rounds 3] [--workloads own,shared,sampled] [--clients 1,4,16]
    python benchmarks/server.py --model build/smollm2 --rounds 1 --tokens 24
    python benchmarks/server.py --model build/smollm2 --kv-bits 8 --workloads own --clients 8 --rounds 1

Both servers run as processes of their own and take turns; while one is measured, the other idles. Without --model they
serve the bundled reference model, and mlx_lm.server gets what mlx-kv gives itself on a CPU: the weights in float32 (a
copy in a temporary directory). Both get the tuned BLAS; without these mlx_lm.server would be several times slower, and
the figures would be about those. A --model is served as it is: on a CPU, give one in float32.

What is measured. Clients send streamed completions of --tokens tokens, one after the other, at least 12 and 6 of each
client; each prompt is some 300 tokens of source code. "Own" prompts have nothing in common; "shared" ones begin with
the same 250 tokens, which both servers find in memory (mlx-kv with its default --prompt-memory-bytes); both are greedy.
"Sampled" ones are own prompts, with temperature, top_p, top_k, min_p and a repetition penalty. Tokens per second are
those of all clients over the wall time, prompts included. Time to first token is from sending the request to the first
piece of text, median and 99th percentile over requests.

The physics. One decode step reads all weights once, however many rows it has: so throughput grows with clients until
arithmetic or the loop around it is the limit. Both sides run the same model, so with one
client, where prompt and steps are nine tenths of the time, neither can be much faster. The difference is what is around
it: caches (ours write in place and read ragged rows through one mask, mlx-lm's move rows when batches change), how many
prompt tokens are read in one pass while others wait, HTTP and detokenising. With --kv-bits mlx_lm.server takes one
request after the other; ours batches them.

Ratios are ours / mlx-lm for throughput and mlx-lm / ours for times: more than 1 is in our favour. `same_answers` is the
share of greedy prompts to which both gave the same text. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx

# mlx_kv before mlx: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv.bundled import model_path

# isort: split
import mlx.core as mx
from common import medians, take_turns

LEAST_REQUESTS, OF_EACH = 12, 6
ROOT = Path(__file__).parent.parent
SOURCE = "".join(path.read_text() for path in sorted((ROOT / "mlx_kv").rglob("*.py")))
SHARED = SOURCE[:800]
MLX_LM = [sys.executable, "-c", "import mlx_kv; from mlx_lm.server import main; main()"]
OURS = [sys.executable, "-c", "from mlx_kv.cli.main import main; main()", "serve"]
answers: dict[str, dict[str, str]] = {}  # by prompt: what each side made of it
_starts = {workload: count(first, 31) for workload, first in (("own", 1000), ("shared", 1000), ("sampled", 200_000))}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.1}


def prompts(workload: str, n: int) -> list[str]:
    """Prompts that no server has seen."""
    starts = [next(_starts[workload]) for _ in range(n)]
    if workload != "shared":
        return [SOURCE[start : start + 950] for start in starts]
    return [SHARED + SOURCE[start : start + 150] for start in starts]


def completion(client: httpx.Client, side: str, workload: str, prompt: str, most: int) -> tuple[float, int]:
    """Seconds to the first piece of text, and tokens generated."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": most, "temperature": 0, "stream": True}
    if workload == "sampled":
        body |= SAMPLED
    body["stream_options"] = {"include_usage": True}
    started, first, text, tokens = time.perf_counter(), 0.0, "", 0
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line.removeprefix("data: "))
            if piece["choices"] and piece["choices"][0]["text"]:
                first = first or time.perf_counter() - started
                text += piece["choices"][0]["text"]
            tokens = (piece.get("usage") or {}).get("completion_tokens", tokens)
    if workload != "sampled":
        answers.setdefault(prompt, {})[side] = text
    return first, tokens


def measure(
    url: str, side: str, workload: str, asked: list[str], clients: int, tokens_of: tuple[int, int]
) -> dict[str, float]:
    lengths = [random.Random(prompt).randint(*tokens_of) for prompt in asked]  # the same on both sides
    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(clients) as pool:
        started = time.perf_counter()
        results = list(pool.map(lambda *each: completion(client, side, workload, *each), asked, lengths))
        seconds = time.perf_counter() - started
    firsts = sorted(first for first, _ in results)
    return {
        "tokens_per_second": sum(tokens for _, tokens in results) / seconds,
        "first_token": statistics.median(firsts),
        "first_token_99th": firsts[math.ceil(0.99 * len(firsts)) - 1],
    }


@contextlib.contextmanager
def process(words: list[str], environment: dict[str, str] | None = None) -> Iterator[tuple[str, int]]:
    """A server as a process of its own, once it answers: its address and its process number."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = [*words, "--host", "127.0.0.1", "--port", str(port)]
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/v1/models").status_code == 200:
                    break
            if running.poll() is not None:
                raise SystemExit(f"{' '.join(words)} ended with exit code {running.returncode}")
            time.sleep(0.1)
        yield url, running.pid
    finally:
        running.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(30)
        running.kill()


def in_float32(folder: Path) -> str:
    """A copy of the reference model in float32."""
    source = Path(model_path("reference"))
    for path in source.glob("*.json"):
        shutil.copy(path, folder)
    weights: Any = mx.load(str(source / "model.safetensors"))
    weights = {name: weight.astype(mx.float32) for name, weight in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return str(folder)


def names(text: str) -> list[str]:
    return text.split(",")


def bounds(text: str) -> tuple[int, int]:
    """Of "48" or "24-72"."""
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory; without it, the bundled reference model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=bounds, default="48", metavar="N or N-M", help="of each answer")
    parser.add_argument("--workloads", type=names, default=list(_starts))
    parser.add_argument("--clients", type=lambda text: [*map(int, text.split(","))], default=[1, 4, 16])
    parser.add_argument("--kv-bits", type=int, help="of both sides")
    return parser.parse_args()


def compared(asked: argparse.Namespace, workload: str, clients: int, theirs: str, ours: str) -> dict[str, float]:
    """Both sides get the same prompts, each round others: a side takes as many turns as the other."""
    turns = {"mlx-lm": count(), "ours": count()}
    size = max(LEAST_REQUESTS, OF_EACH * clients)
    batches = [prompts(workload, n) for n in (max(2, clients), *[size] * asked.rounds)]  # the first does not count
    sides = {
        side: lambda side=side, url=url: measure(url, side, workload, batches[next(turns[side])], clients, asked.tokens)
        for side, url in (("mlx-lm", theirs), ("ours", ours))
    }
    got = {side: medians(runs) for side, runs in take_turns(asked.rounds, sides).items()}
    for side, figures in got.items():
        print(
            f"{workload:<7} {clients:2} clients  {side:<7} {figures['tokens_per_second']:8.1f} tokens/s  first token "
            f"{figures['first_token'] * 1e3:8.1f} ms, 99th {figures['first_token_99th'] * 1e3:8.1f} ms",
            file=sys.stderr,
        )
    found = {f"{name}_{side.replace('-', '_')}": round(x, 4) for side, each in got.items() for name, x in each.items()}
    first, second = got["ours"], got["mlx-lm"]
    found["throughput_ratio"] = round(first["tokens_per_second"] / second["tokens_per_second"], 3)
    for name in ("first_token", "first_token_99th"):
        found[f"{name}_ratio"] = round(second[name] / first[name], 3)
    return {f"{workload}_{clients}_{name}": value for name, value in found.items()}


def main() -> None:
    asked = options()
    line: dict[str, Any] = {"benchmark": "server", "device": str(mx.default_device()), "rounds": asked.rounds}
    bits = [] if asked.kv_bits is None else ["--kv-bits", str(asked.kv_bits)]
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model or in_float32(Path(folder))
        own = [] if asked.model is None else ["--model", asked.model]
        with process([*MLX_LM, "--model", model, *bits]) as (theirs, _), process([*OURS, *own, *bits]) as (ours, _):
            for workload in asked.workloads:
                for clients in asked.clients:
                    line |= compared(asked, workload, clients, theirs, ours)
    both = [texts for texts in answers.values() if len(texts) == 2]
    if both:
        line["same_answers"] = round(sum(texts["ours"] == texts["mlx-lm"] for texts in both) / len(both), 4)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
