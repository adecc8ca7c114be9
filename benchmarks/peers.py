"""Four servers side by side: `mlx-kv serve`, `mlx_lm.server`, vllm-mlx and Rapid-MLX, on this machine, with one model.

    python tools/smollm2.py build/smollm2
    python benchmarks/peers.py --model build/smollm2
    python benchmarks/peers.py --model build/smollm2 --vllm-mlx ENVIRONMENT/bin/vllm-mlx --rapid-mlx OTHER/bin/rapid-mlx

vllm-mlx and Rapid-MLX need other versions of MLX, so each is in an environment of its own (`pip install
vllm-mlx==0.6.0 "mlx[cpu]==0.32.4"`, `pip install rapid-mlx==0.16.10 "mlx[cpu]==0.32.4"`); without --vllm-mlx or
--rapid-mlx it is left out. On a Linux CPU all servers get the same tuned BLAS.

Each server is a new process for each workload, with an empty home folder: vllm-mlx and Rapid-MLX keep prompts there
when they end, and would find those of earlier runs. First it answers one prompt, then --clients clients send one
streamed greedy completion each, at once:

shared:  prompts of --shared tokens in common (about; the first prompt has them, too) and 40 of their own.
own:     prompts of 300 tokens with nothing in common.
long:    four clients stream three times as many tokens as --tokens each, after prompts of 300 tokens; once all of them
         stream, another client sends a prompt of --long tokens.
uneven:  prompts of 30 to 1,500 tokens, and answers of a quarter of --tokens to three times as many.
limits:  chats that end after a line, with a `max_tokens` of 32,000, as coding agents send it.
hangups: the prompts of `own`, and as many clients again that want 32,000 tokens and hang up after four pieces of text.
         A second later one more client sends a prompt.

Tokens per second are those of all clients that stay over the time until the last of them is done. First token is the
median over them, from sending; in `long` it is that of the long prompt, and in `hangups` that of the client that comes
later. Pause is the longest time between two pieces of text of a stream. CPU is the processor time of the server from
the first of these requests to the last answer, which other work on the machine hardly changes. Peak is the most
resident memory of the process (VmHWM), with the weights. Ratios are ours over the other's. Servers take turns, round by
round, in alternating order; medians of rounds, with the least and the greatest in `range`: compare servers only where
these do not overlap. A run in which a request fails, or that takes more than --patience seconds, counts as failed and
has no figures. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import httpx
import numpy as np
from common import medians
from room import chats
from server import MLX_LM, OURS, SOURCE, process

import mlx_kv

STREAMS = 4  # beside a long prompt
LIMIT = 32_000  # `max_tokens` of coding agents


class Request(NamedTuple):
    prompt: str
    tokens: int  # at most
    pieces: int = sys.maxsize  # of text, after which the client hangs up


def requests(workload: str, asked: argparse.Namespace, tokenizer: Any) -> list[Request]:
    """One request for the warm-up, and one for each client; in `long` and `hangups` the last comes later."""
    clients, tokens = asked.clients, asked.tokens

    def distinct(count: int, characters: int = 950) -> list[str]:
        return [SOURCE[start : start + characters] for start in range(5000, 5000 + 2000 * count, 2000)]

    match workload:
        case "shared":
            characters = max(20_000, 6 * asked.shared)
            beginning = tokenizer.decode(tokenizer.encode(SOURCE[:characters])[: asked.shared])
            starts = range(30_000 + characters, 30_000 + characters + 700 * (clients + 1), 700)
            return [Request(beginning + SOURCE[start : start + 130], tokens) for start in starts]
        case "own":
            return [Request(prompt, tokens) for prompt in distinct(clients + 1)]
        case "long":
            prompt = tokenizer.decode(tokenizer.encode(SOURCE[100_000 : 100_000 + 10 * asked.long])[: asked.long])
            return [*(Request(each, 3 * tokens) for each in distinct(STREAMS + 1)), Request(prompt, tokens)]
        case "uneven":
            chance = random.Random(0)
            sizes = [(chance.randint(100, 4800), chance.randint(tokens // 4, 3 * tokens)) for _ in range(clients + 1)]
            return [Request(distinct(n + 1, size)[n], most) for n, (size, most) in enumerate(sizes)]
        case "limits":
            questions = [bodies[0]["messages"] for bodies in chats(clients + 1, LIMIT)]
            texts = [
                tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False) for each in questions
            ]
            return [Request(text, LIMIT) for text in texts]
        case "hangups":
            texts = distinct(2 * clients + 2)
            gone = [Request(text, LIMIT, 4) for text in texts[clients + 1 : -1]]
            return [*(Request(text, tokens) for text in texts[: clients + 1]), *gone, Request(texts[-1], tokens)]
    raise SystemExit(f"no workload {workload}")


def tuned_blas() -> str | None:
    """The library that MLX multiplies with here, to load into each server; None where there is none."""
    library = mlx_kv.blas.preload() if sys.platform == "linux" else None
    return library if library and Path(library).exists() else None


def peak(pid: int) -> int:
    """The most bytes of memory that a process has had; 0 where that is not known."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has taken; 0 where that is not known."""
    path = Path(f"/proc/{pid}/stat")
    fields = path.read_text().rpartition(")")[2].split() if path.exists() else ["0"] * 13
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def completion(
    client: httpx.Client, model: str, request: Request, streaming: Event | None = None
) -> tuple[list[float], int]:
    """Seconds from sending to each piece of text, and tokens generated; sets the event with the first piece."""
    body = {"model": model, "prompt": request.prompt, "max_tokens": request.tokens, "temperature": 0, "stream": True}
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
                if len(pieces) == request.pieces:
                    break
            counted = (piece.get("usage") or {}).get("completion_tokens", counted)
    return pieces or [time.perf_counter() - began], counted or len(pieces)


def measure(words: list[str], model: str, workload: str, asked: list[Request], patience: float) -> dict[str, float]:
    """The figures of one server, in a process of its own; none if a request fails."""
    preloaded = {"LD_PRELOAD": blas} if (blas := tuned_blas()) else {}
    later = workload in ("long", "hangups")
    first, *together = asked[:-1] if later else asked
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home,
        ThreadPoolExecutor(len(asked)) as pool,  # outside the server, whose end ends its requests
        process(words, os.environ | preloaded | {"HOME": home}) as (url, pid),
        httpx.Client(base_url=url, timeout=patience, limits=httpx.Limits(max_connections=None)) as client,
    ):
        try:
            completion(client, model, first._replace(tokens=4))
            began, worked, events = time.perf_counter(), cpu_seconds(pid), [Event() for _ in together]
            jobs = [
                pool.submit(completion, client, model, request, event)
                for request, event in zip(together, events, strict=True)
            ]

            def answer(job: Future[tuple[list[float], int]]) -> tuple[list[float], int]:
                return job.result(max(0.0, began + patience - time.perf_counter()))

            if workload == "long":
                for event in events:
                    event.wait(patience)
                jobs.append(pool.submit(completion, client, model, asked[-1]))
            results = [answer(job) for job, each in zip(jobs, asked[1:], strict=False) if each.pieces == sys.maxsize]
            seconds = time.perf_counter() - began
            firsts = [pieces[0] for pieces, _ in results]
            if workload == "hangups":
                for job in jobs:
                    answer(job)
                time.sleep(1)
                firsts.append(answer(pool.submit(completion, client, model, asked[-1]))[0][0])
        except (httpx.HTTPError, TimeoutError) as error:
            print(f"{workload:<7} {words[0]} {type(error).__name__}: {error}", file=sys.stderr)
            return {}
        return {
            "tokens_per_second": round(sum(count for _, count in results) / seconds, 2),
            "first_token_s": round(firsts[-1] if later else statistics.median(firsts), 3),
            "pause_s": round(max(float(np.diff(pieces).max(initial=0)) for pieces, _ in results[: len(together)]), 3),
            "cpu_s": round(cpu_seconds(pid) - worked, 1),
            "peak_gb": round(peak(pid) / 1e9, 3),
        }


def add_peers(parser: argparse.ArgumentParser) -> None:
    """Options for the servers of other environments."""
    parser.add_argument("--vllm-mlx", help="the program of another environment")
    parser.add_argument("--rapid-mlx", help="the program of another environment")


def commands(options: argparse.Namespace, model: str) -> dict[str, list[str]]:
    """What starts each server.

    Args:
        model: the whole path of its folder, by which Rapid-MLX knows it.
    """
    found = {"mlx_kv": [*OURS, "--model", model], "mlx_lm": [*MLX_LM, "--model", model]}
    if options.vllm_mlx:
        found["vllm_mlx"] = [options.vllm_mlx, "serve", model, "--continuous-batching"]
    if options.rapid_mlx:
        found["rapid_mlx"] = [options.rapid_mlx, "serve", model, "--yes", "--no-preflight"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory; on a CPU, in float32")
    add_peers(parser)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--shared", type=int, default=2000, help="tokens that prompts have in common")
    parser.add_argument("--long", type=int, default=3000, help="tokens of the long prompt")
    parser.add_argument("--workloads", default="shared,own,long,uneven,limits,hangups")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--patience", type=float, default=300, help="seconds after which a run failed")
    options = parser.parse_args()
    options.model = str(Path(options.model).resolve())
    tokenizer = mlx_kv.load(options.model)[1]
    servers = commands(options, options.model)
    line: dict[str, Any] = {"benchmark": "peers", "clients": options.clients, "shared": options.shared}
    for workload in options.workloads.split(","):
        asked = requests(workload, options, tokenizer)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for number in range(options.rounds):
            for name in list(servers)[:: 1 if number % 2 == 0 else -1]:
                runs[name].append(measure(servers[name], options.model, workload, asked, options.patience))
                print(f"{workload:<7} {name:<9} {runs[name][-1] or 'failed'}", file=sys.stderr)
        good = {name: [run for run in each if run] for name, each in runs.items()}
        found = {name: medians(each) if each else {} for name, each in good.items()}
        for name, each in found.items():
            ranges = {key: [min(run[key] for run in good[name]), max(run[key] for run in good[name])] for key in each}
            found[name] = each | {"range": ranges, "failed": options.rounds - len(good[name])}
        for name in [name for name in found if name != "mlx_kv"]:
            found[name] |= {
                f"{key}_ratio": round(found["mlx_kv"][key] / found[name][key], 3)
                for key in found[name]["range"]
                if key in found["mlx_kv"] and found[name][key]
            }
        line[workload] = found
    print(json.dumps(line))


if __name__ == "__main__":
    main()
