"""Throughput and time to first token of `mlx-kv serve` against `mlx_lm.server`, same machine, same model.

    python benchmarks/server.py [--rounds 3]

Both servers run as processes of their own with the bundled reference model and take turns; while one is measured, the
other idles. mlx_lm.server gets what mlx-kv gives itself on a CPU: the weights in float32 (a copy in a temporary
directory) and the tuned BLAS; without them it would be several times slower, and the figures would be about those.

What is measured. 1, 4 or 16 clients send streamed completions of 48 tokens, greedy, one after the other, at least 12
and 6 of each client; each prompt is some 300 tokens of source code. "Own" prompts have nothing in common; "shared" ones
begin with the same 250 tokens, which both servers find in memory (mlx-kv with its default --prompt-memory-bytes).
Tokens per second are those of all clients over the wall time, prompts included. Time to first token is from sending the
request to the first piece of text, median over requests.

The physics. One decode step reads all weights once (16 MB in float32), however many rows it has: so throughput grows
with clients until arithmetic or the loop around it is the limit. Both sides run the same model in mlx-lm's batching
loop, so with one client, where prompt and steps are nine tenths of the time, nobody can be much faster. The difference
is what is around it: caches (ours write in place and read ragged rows through one mask, mlx-lm's move rows when batches
change), how many prompt tokens are read in one pass while others wait, HTTP and detokenising.

Ratios are ours / mlx-lm for throughput and mlx-lm / ours for times: more than 1 is in our favour. `same_answers` is the
share of prompts to which both gave the same text. The last line is one JSON object.
"""

from __future__ import annotations

import contextlib
import json
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
import mlx.core as mx
from common import medians, rounds_from_command_line, take_turns

from mlx_kv.bundled import model_path

TOKENS = 48
CLIENTS = (1, 4, 16)
ROOT = Path(__file__).parent.parent
SOURCE = "".join(path.read_text() for path in sorted((ROOT / "mlx_kv").rglob("*.py")))
SHARED = SOURCE[:800]
MLX_LM = "import mlx_kv; from mlx_lm.server import main; main()"
OURS = "from mlx_kv.cli.main import main; main()"
answers: dict[str, dict[str, str]] = {}  # by prompt: what each side made of it
_starts = {workload: count(1000, 31) for workload in ("own", "shared")}


def prompts(workload: str, n: int) -> list[str]:
    """Prompts that no server has seen."""
    starts = [next(_starts[workload]) for _ in range(n)]
    if workload == "own":
        return [SOURCE[start : start + 950] for start in starts]
    return [SHARED + SOURCE[start : start + 150] for start in starts]


def completion(client: httpx.Client, side: str, prompt: str, most: int) -> tuple[float, int]:
    """Seconds to the first piece of text, and tokens generated."""
    body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "stream": True}
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
    answers.setdefault(prompt, {})[side] = text
    return first, tokens


def measure(url: str, side: str, asked: list[str], clients: int, most: int = TOKENS) -> dict[str, float]:
    with httpx.Client(base_url=url, timeout=300) as client, ThreadPoolExecutor(clients) as pool:
        started = time.perf_counter()
        results = list(pool.map(lambda prompt: completion(client, side, prompt, most), asked))
        seconds = time.perf_counter() - started
    return {
        "tokens_per_second": sum(tokens for _, tokens in results) / seconds,
        "first_token_seconds": statistics.median(first for first, _ in results),
    }


@contextlib.contextmanager
def started(program: str, *options: str) -> Iterator[str]:
    """A server as a process, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = [sys.executable, "-c", program, *options, "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def in_float32(folder: Path) -> str:
    """A copy of the reference model in float32."""
    source = Path(model_path("reference"))
    for path in source.glob("*.json"):
        shutil.copy(path, folder)
    weights: Any = mx.load(str(source / "model.safetensors"))
    weights = {name: weight.astype(mx.float32) for name, weight in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return str(folder)


def main() -> None:
    rounds = rounds_from_command_line(__doc__)
    line: dict[str, Any] = {"benchmark": "server", "device": str(mx.default_device()), "rounds": rounds}
    with (
        tempfile.TemporaryDirectory() as folder,
        started(MLX_LM, "--model", in_float32(Path(folder))) as theirs,
        started(OURS, "serve") as ours,
    ):
        for workload in _starts:
            for clients in CLIENTS:
                # Both sides get the same prompts, each round others: a side takes as many turns as the other.
                turns = {"mlx-lm": count(), "ours": count()}
                batches = [prompts(workload, max(12, 6 * clients)) for _ in range(rounds + 1)]
                sides = {
                    side: lambda side=side, url=url: measure(url, side, batches[next(turns[side])], clients)  # noqa: B023
                    for side, url in (("mlx-lm", theirs), ("ours", ours))
                }
                got = {side: medians(runs) for side, runs in take_turns(rounds, sides).items()}
                name = f"{workload}_{clients}"
                for side, short in (("mlx-lm", "mlx_lm"), ("ours", "ours")):
                    speed, first = got[side]["tokens_per_second"], got[side]["first_token_seconds"]
                    line[f"{name}_tokens_per_second_{short}"] = round(speed, 1)
                    line[f"{name}_first_token_ms_{short}"] = round(first * 1e3, 1)
                    print(
                        f"{workload:<6} {clients:2} clients  {side:<7} {speed:8.1f} tokens/s  "
                        f"first token {first * 1e3:8.1f} ms",
                        file=sys.stderr,
                    )
                line[f"{name}_throughput_ratio"] = round(
                    got["ours"]["tokens_per_second"] / got["mlx-lm"]["tokens_per_second"], 3
                )
                line[f"{name}_first_token_ratio"] = round(
                    got["mlx-lm"]["first_token_seconds"] / got["ours"]["first_token_seconds"], 3
                )
    both = [texts for texts in answers.values() if len(texts) == 2]
    line["same_answers"] = round(sum(texts["ours"] == texts["mlx-lm"] for texts in both) / len(both), 4)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
