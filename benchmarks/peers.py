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
long:   four clients stream three times as many tokens as --tokens each, after prompts of 300 tokens; once all of them
        stream, another client sends a prompt of --long tokens.

Tokens per second are those of all clients over the time until the last one is done. First token is the median over
clients, from sending; in `long` it is that of the long prompt, and pause is the longest time between two pieces of text
of a stream. Peak is the most resident memory of the process (VmHWM), with the weights. Ratios are ours over the
other's. Servers take turns, round by round; medians of rounds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import numpy as np
from server import MLX_LM, OURS, process

import mlx_kv

STREAMS = 4  # beside a long prompt
ROOT = Path(__file__).parent.parent
SOURCE = "".join(path.read_text() for path in sorted((ROOT / "mlx_kv").rglob("*.py")))


def prompts(workload: str, clients: int, shared: int, long: int, tokenizer: Any) -> list[str]:
    """One prompt for the warm-up, and one for each client; the last of `long` is the long one."""
    if workload == "long":
        start = 100_000
        return [
            *prompts("own", STREAMS, shared, long, tokenizer),
            tokenizer.decode(tokenizer.encode(SOURCE[start : start + 10 * long])[:long]),
        ]
    if workload == "own":
        return [SOURCE[start : start + 950] for start in range(5000, 5000 + 2000 * (clients + 1), 2000)]
    beginning = tokenizer.decode(tokenizer.encode(SOURCE[:20_000])[:shared])
    return [beginning + SOURCE[start : start + 130] for start in range(50_000, 50_000 + 700 * (clients + 1), 700)]


def tuned_blas() -> str | None:
    """The library that MLX multiplies with here, to load into each server; None where there is none."""
    library = mlx_kv.blas.preload() if sys.platform == "linux" else None
    return library if library and Path(library).exists() else None


def peak(pid: int) -> int:
    """The most bytes of memory that a process has had; 0 where that is not known."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def completion(
    client: httpx.Client, model: str, prompt: str, tokens: int, streaming: Event | None = None
) -> tuple[list[float], int]:
    """Seconds from sending to each piece of text, and tokens generated; sets the event with the first piece."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    began, pieces, counted = time.perf_counter(), list[float](), 0
    with client.stream("POST", "/v1/completions", json=body | {"stream_options": {"include_usage": True}}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line.removeprefix("data: "))
            if piece.get("choices") and piece["choices"][0].get("text"):
                pieces.append(time.perf_counter() - began)
                if streaming is not None:
                    streaming.set()
            counted = (piece.get("usage") or {}).get("completion_tokens", counted)
    return pieces or [time.perf_counter() - began], counted or len(pieces)


def measure(words: list[str], model: str, workload: str, asked: list[str], tokens: int) -> dict[str, float]:
    """The figures of one server, in a process of its own."""
    environment = os.environ | ({"LD_PRELOAD": blas} if (blas := tuned_blas()) else {})
    with process(words, environment) as (url, pid), httpx.Client(base_url=url, timeout=1200) as client:
        completion(client, model, asked[0], 4)
        with ThreadPoolExecutor(len(asked) - 1) as pool:
            began = time.perf_counter()
            if workload == "long":
                events = [Event() for _ in range(STREAMS)]
                jobs = [
                    pool.submit(completion, client, model, prompt, 3 * tokens, event)
                    for prompt, event in zip(asked[1:-1], events, strict=True)
                ]
                for event in events:
                    event.wait(600)
                jobs.append(pool.submit(completion, client, model, asked[-1], tokens))
                results = [job.result() for job in jobs]
            else:
                results = list(pool.map(lambda prompt: completion(client, model, prompt, tokens), asked[1:]))
            seconds = time.perf_counter() - began
        firsts = [pieces[0] for pieces, _ in results]
        found = {
            "tokens_per_second": round(sum(count for _, count in results) / seconds, 2),
            "first_token_s": round(firsts[-1] if workload == "long" else statistics.median(firsts), 3),
            "peak_gb": round(peak(pid) / 1e9, 3),
        }
        if workload == "long":
            found["pause_s"] = round(max(float(np.diff(pieces).max(initial=0)) for pieces, _ in results[:-1]), 3)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory; on a CPU, in float32")
    parser.add_argument("--vllm-mlx", help="the program of another environment")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--shared", type=int, default=2000, help="tokens that prompts have in common")
    parser.add_argument("--long", type=int, default=3000, help="tokens of the long prompt")
    parser.add_argument("--workloads", default="shared,own,long")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    tokenizer = mlx_kv.load(options.model)[1]
    servers = {
        "mlx_kv": [*OURS, "--model", options.model],
        "mlx_lm": [*MLX_LM, "--model", options.model],
    }
    if options.vllm_mlx:
        servers["vllm_mlx"] = [options.vllm_mlx, "serve", options.model, "--continuous-batching"]
    line: dict[str, Any] = {"benchmark": "peers", "clients": options.clients, "shared": options.shared}
    for workload in options.workloads.split(","):
        asked = prompts(workload, options.clients, options.shared, options.long, tokenizer)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for number in range(options.rounds):
            for name in list(servers)[:: 1 if number % 2 == 0 else -1]:
                runs[name].append(measure(servers[name], options.model, workload, asked, options.tokens))
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
