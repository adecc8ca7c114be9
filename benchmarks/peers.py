"""Three servers side by side: `mlx-kv serve`, `mlx_lm.server` and vllm-mlx, on this machine and with the same model.

    python tools/smollm2.py build/smollm2
    python benchmarks/peers.py --model build/smollm2
    python benchmarks/peers.py --model build/smollm2 --vllm-mlx OTHER_ENVIRONMENT/bin/vllm-mlx

vllm-mlx needs another version of MLX, so it is in an environment of its own (`pip install vllm-mlx==0.6.0
"mlx[cpu]==0.32.4"`); without --vllm-mlx it is left out. On a Linux CPU all servers get the same tuned BLAS.

Each server is a new process for each workload. First it answers one prompt, then --clients clients send one streamed
greedy completion each, at once:

shared: prompts of --shared tokens in common (about; the first prompt has them, too) and 40 of their own.
own:    prompts of 300 tokens with nothing in common.

Tokens per second are those of all clients over the time until the last one is done. First token is the median over
clients, from sending. Peak is the most resident memory of the process (VmHWM), weights and all. Ratios are ours over
the other's. Servers take turns, round by round; medians of rounds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

import mlx_kv

ROOT = Path(__file__).parent.parent
SOURCE = "".join(path.read_text() for path in sorted((ROOT / "mlx_kv").rglob("*.py")))
OURS = "from mlx_kv.cli.main import main; main()"
MLX_LM = "import mlx_kv; from mlx_lm.server import main; main()"


def prompts(workload: str, clients: int, shared: int, tokenizer: Any) -> list[str]:
    """One prompt for the warm-up, and one for each client."""
    if workload == "own":
        return [SOURCE[start : start + 950] for start in range(5000, 5000 + 2000 * (clients + 1), 2000)]
    beginning = tokenizer.decode(tokenizer.encode(SOURCE[:20_000])[:shared])
    return [beginning + SOURCE[start : start + 130] for start in range(50_000, 50_000 + 700 * (clients + 1), 700)]


@contextlib.contextmanager
def started(words: list[str]) -> Iterator[tuple[str, int]]:
    """A server as a process: its address, and its number."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = os.environ | ({"LD_PRELOAD": blas} if (blas := tuned_blas()) else {})
    words = [*words, "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/v1/models").status_code == 200:
                    break
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(words)} ended with exit code {process.returncode}")
            time.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()


def tuned_blas() -> str | None:
    """The library that MLX multiplies with here, to load into each server; None where there is none."""
    library = mlx_kv.blas.preload() if sys.platform == "linux" else None
    return library if library and Path(library).exists() else None


def peak(pid: int) -> int:
    """The most bytes of memory that a process has had; 0 where that is not known."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def completion(client: httpx.Client, model: str, prompt: str, tokens: int) -> tuple[float, int]:
    """Seconds to the first piece of text, and tokens generated."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    began, first, pieces, counted = time.perf_counter(), 0.0, 0, 0
    with client.stream("POST", "/v1/completions", json=body | {"stream_options": {"include_usage": True}}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line.removeprefix("data: "))
            if piece.get("choices") and piece["choices"][0].get("text"):
                first, pieces = first or time.perf_counter() - began, pieces + 1
            counted = (piece.get("usage") or {}).get("completion_tokens", counted)
    return first, counted or pieces


def measure(words: list[str], model: str, asked: list[str], tokens: int) -> dict[str, float]:
    with started(words) as (url, pid), httpx.Client(base_url=url, timeout=1200) as client:
        completion(client, model, asked[0], 4)
        with ThreadPoolExecutor(len(asked) - 1) as pool:
            began = time.perf_counter()
            results = list(pool.map(lambda prompt: completion(client, model, prompt, tokens), asked[1:]))
            seconds = time.perf_counter() - began
        return {
            "tokens_per_second": round(sum(count for _, count in results) / seconds, 2),
            "first_token_s": round(statistics.median(first for first, _ in results), 3),
            "peak_gb": round(peak(pid) / 1e9, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory; on a CPU, in float32")
    parser.add_argument("--vllm-mlx", help="the program of another environment")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--shared", type=int, default=2000, help="tokens that prompts have in common")
    parser.add_argument("--workloads", default="shared,own")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    tokenizer = mlx_kv.load(options.model)[1]
    servers = {
        "mlx_kv": [sys.executable, "-c", OURS, "serve", "--model", options.model],
        "mlx_lm": [sys.executable, "-c", MLX_LM, "--model", options.model],
    }
    if options.vllm_mlx:
        servers["vllm_mlx"] = [options.vllm_mlx, "serve", options.model, "--continuous-batching"]
    line: dict[str, Any] = {"benchmark": "peers", "clients": options.clients, "shared": options.shared}
    for workload in options.workloads.split(","):
        asked = prompts(workload, options.clients, options.shared, tokenizer)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for number in range(options.rounds):
            for name in list(servers)[:: 1 if number % 2 == 0 else -1]:
                runs[name].append(measure(servers[name], options.model, asked, options.tokens))
                print(f"{workload:<7} {name:<9} {runs[name][-1]}", file=sys.stderr)
        found = {
            name: {key: statistics.median(run[key] for run in each) for key in each[0]} for name, each in runs.items()
        }
        for name in [name for name in found if name != "mlx_kv"]:
            ratios = {
                f"{key}_ratio": round(found["mlx_kv"][key] / value, 3) for key, value in found[name].items() if value
            }
            found[name] |= ratios
        line[workload] = found
    print(json.dumps(line))


if __name__ == "__main__":
    main()
