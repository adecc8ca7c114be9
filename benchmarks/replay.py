"""What coding agents sent, sent again: seconds of each request in `mlx-kv serve` and in other servers, with one model.

    python benchmarks/agents.py --programs agents --clients claude,opencode,qwen --turns 3 --requests requests.jsonl
    python tools/smollm2.py build/smollm2
    python benchmarks/replay.py requests.jsonl --client opencode --model build/smollm2 [--sessions 2] \\
        [--vllm-mlx ENVIRONMENT/bin/vllm-mlx] [--rapid-mlx OTHER/bin/rapid-mlx]

The first command keeps the requests of real agents, which talked with a server whose answers a script wrote. The last
sends those of one agent to each server, one after the other as the agent did: all that it sent, but for the model's
name and the limit of answers, which is --tokens. So tools, system prompts and the order of requests are the agent's,
answers in the history are the script's, and what a server generates here is dropped. With --sessions, as many copies of
the conversation are sent at once, each in a repository of its own: their prompts differ from the folder's name on,
within the system prompt. The model has the chat template of benchmarks/agents.py, and where no --model is given two
thin layers of a --family with random weights: full attention (llama), every second layer with a window of 512 tokens
(gemma3_text) or recurrent (qwen3_next). There tokenizer and host count for more than they do with a model of use.

In a terminal, Claude Code's first line has a number that changes with each request; without one, as it was recorded, it
has none. --changing-line puts it there.

Each server is a new process with an empty home folder, and answers one short request before. For each request: seconds
from sending to the end of its answer, nearly all of them for the prompt, and the cached tokens that the server reports
(null if it reports none). `first` is the longest request of the first turn, `later` the mean over all requests of later
turns, of all sessions. Peak is the most resident memory of the process (VmHWM), with the weights. A server that has no
route for the agent's requests has `failed` with the status. Servers take turns, round by round, in alternating order;
medians of rounds, with the least and the greatest in `range`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from agents import FAMILIES, make_model
from common import medians
from peers import add_peers, commands, peak, tuned_blas
from server import process


def in_session(body: dict[str, Any], session: int, number: int | None) -> dict[str, Any]:
    """What the agent would have sent from another repository, and with another first line if a number is given."""
    text = json.dumps(body).replace("-repository", f"-repository-{session}")
    text = text if number is None else text.replace("cc_entrypoint=sdk-cli;", f"cc_entrypoint=cli; cch={number:05x};")
    changed: dict[str, Any] = json.loads(text)
    return changed


def send(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[float, int | None]:
    """Seconds until the end of an answer, and cached tokens as the server reports them."""
    begin, cached = time.perf_counter(), None
    with client.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            answer.read()
            raise ValueError(f"{path}: {answer.status_code} {answer.text[:200]}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line.removeprefix("data: "))
            usage = piece.get("usage") or (piece.get("message") or piece.get("response") or {}).get("usage") or {}
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
            cached = details.get("cached_tokens", usage.get("cache_read_input_tokens", cached))
    return time.perf_counter() - begin, cached


def converse(
    client: httpx.Client, requests: list[dict[str, Any]], session: int, changes: bool
) -> list[tuple[float, int | None]]:
    return [
        send(client, each["path"], in_session(each["body"], session, number if changes else None))
        for number, each in enumerate(requests)
    ]


def measure(words: list[str], model: str, requests: list[dict[str, Any]], asked: argparse.Namespace) -> dict[str, Any]:
    """The figures of one server, in a process of its own, or why there are none."""
    preloaded = {"LD_PRELOAD": blas} if (blas := tuned_blas()) else {}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home,
        ThreadPoolExecutor(asked.sessions) as pool,
        process(words, os.environ | preloaded | {"HOME": home}) as (url, pid),
        httpx.Client(base_url=url, timeout=3600, headers={"Authorization": "Bearer none"}) as client,
    ):
        begun = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True}
        try:
            send(client, "/v1/chat/completions", begun)
            found = list(pool.map(lambda n: converse(client, requests, n, asked.changing_line), range(asked.sessions)))
        except (httpx.HTTPError, ValueError) as error:
            return {"failed": str(error)}
        every = [(each["turn"], *one) for answers in found for each, one in zip(requests, answers, strict=True)]
        return {
            "first_s": round(max(seconds for turn, seconds, _ in every if turn == 1), 2),
            "later_s": round(statistics.mean(seconds for turn, seconds, _ in every if turn > 1), 2),
            "all_s": round(max(sum(seconds for seconds, _ in answers) for answers in found), 1),
            "peak_gb": round(peak(pid) / 1e9, 3),
            "seconds": [[round(seconds, 2) for seconds, _ in answers] for answers in found],
            "cached": [[cached for _, cached in answers] for answers in found],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=Path, help="what benchmarks/agents.py --requests has written")
    parser.add_argument("--client", default="opencode", help="whose requests")
    parser.add_argument("--model", help="a folder; on a CPU, in float32; two thin layers otherwise")
    parser.add_argument("--family", choices=FAMILIES, default="llama", help="of the two thin layers")
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument(
        "--changing-line",
        action="store_true",
        help="Claude Code's first line with a number that differs in each request",
    )
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--servers", default="mlx_kv,mlx_lm,vllm_mlx,rapid_mlx")
    add_peers(parser)
    options = parser.parse_args()
    requests = [json.loads(line) for line in options.requests.read_text().splitlines()]
    requests = [each for each in requests if each["client"] == options.client]
    if not {1, 2} <= {each["turn"] for each in requests}:
        parser.error(f"{options.requests} has no two turns of {options.client}: see --help")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        folder.mkdir()
        make_model(folder, options.model, options.family)
        model = str(folder.resolve())
        for each in requests:
            limit = "max_output_tokens" if each["path"] == "/v1/responses" else "max_tokens"
            each["body"] |= {"model": model, limit: options.tokens}
        servers = {
            name: words for name, words in commands(options, model).items() if name in options.servers.split(",")
        }
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
        for number in range(options.rounds):
            for name in list(servers)[:: 1 if number % 2 == 0 else -1]:
                runs[name].append(measure(servers[name], model, requests, options))
                print(f"{name:<9} {runs[name][-1]}", file=sys.stderr, flush=True)
    line: dict[str, Any] = {"benchmark": "replay", "client": options.client, "sessions": options.sessions}
    for name, each in runs.items():
        good = [{key: run[key] for key in ("first_s", "later_s", "all_s", "peak_gb")} for run in each if len(run) > 1]
        line[name] = medians(good) if good else {"failed": each[0]["failed"]}
        if good:
            line[name]["range"] = {
                key: [min(run[key] for run in good), max(run[key] for run in good)] for key in good[0]
            }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
