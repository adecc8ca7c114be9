"""Time and memory of many clients with short answers, whatever limit they send, and of clients that are preempted.

    python tools/smollm2.py build/smollm2
    python benchmarks/room.py --model build/smollm2 [--clients 16] [--limits 64,7000,32000] [--rounds 2]
    python benchmarks/room.py --model build/smollm2 --part preemption
    python benchmarks/room.py --model build/smollm2 --part rows

Coding agents send a `max_tokens` of 32,000 and get answers of some tens of tokens. "limits": clients send chats with
one-line answers at once; each server is a process of its own, started anew for each turn, and takes turns with the
others: ours with each limit, and `mlx_lm.server` with the largest that it takes. "preemption": each client asks three
times, with a `max_tokens` of 1,000 for a line and of 400 to continue a program, which is more than is expected of an
answer at first, under a memory limit that holds three requests of 1,000 tokens, and under one that holds six. More are
admitted, since most answers are short, and some have to wait half way. All answers are greedy, and must be the same.
"rows": eight rows decode in one engine, each of which may have 10,000 tokens more; one leaves, another joins, in turns.
Then two rows get 7,000 tokens each, and steps in which their caches grow count as what they take more than their
neighbours.

Ratios: `limit_time_ratio` and `limit_memory_ratio` are of the largest limit over the smallest (1 is best), `time_ratio`
and `memory_ratio` mlx_lm.server over ours (more than 1 is in our favour), `preemption_ratio` the tokens per second with
three over those with six; `leave_ratio` and `join_ratio` a step with a leave or a join (of eight tokens) over one
without. Memory is the peak of the process over that at its start. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import mlx_kv  # before MLX: it loads a tuned BLAS

# isort: split
import httpx
from server import MLX_LM, OURS, SOURCE, process

from mlx_kv import cache_statistics
from mlx_kv.generation.engine import EngineSettings, make_engine
from mlx_kv.generation.sequence import TokenSequence


def resident(pid: int) -> int:
    """Bytes of a process in memory; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS")), 0)


def measure(words: list[str], clients: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Seconds, tokens, peak of memory over the start, answers and preemptions of one server.

    Args:
        clients: bodies of each, which it sends one after the other.
    """
    with process(words) as (url, pid), httpx.Client(base_url=url, timeout=1200) as client:
        before, peak, ended = resident(pid), 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not ended.wait(0.05):
                peak = max(peak, resident(pid))

        def ask(body: dict[str, Any]) -> dict[str, Any]:
            for _ in range(20):  # mlx_lm.server accepts five connections at once, and resets others
                try:
                    answer = client.post("/v1/chat/completions", json=body)
                except httpx.TransportError:
                    time.sleep(0.05)
                    continue
                answer.raise_for_status()
                return dict(answer.json())
            raise SystemExit(f"{url} does not answer")

        watcher = threading.Thread(target=watch)
        watcher.start()
        started = time.perf_counter()
        with ThreadPoolExecutor(len(clients)) as pool:
            answers = [answer for told in pool.map(lambda bodies: [*map(ask, bodies)], clients) for answer in told]
        seconds = time.perf_counter() - started
        ended.set()
        watcher.join()
        preemptions = client.get("/memory").json().get("preemptions", 0) if words[: len(OURS)] == OURS else 0
    texts = [each["choices"][0]["message"]["content"] for each in answers]
    tokens = sum(each["usage"]["completion_tokens"] for each in answers)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "bytes": peak - before,
        "texts": texts,
        "preemptions": preemptions,
    }


def compare(sides: dict[str, Callable[[], dict[str, Any]]], rounds: int) -> dict[str, dict[str, Any]]:
    """The medians of each side, of turns in alternating order."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in list(sides)[:: 1 if number % 2 == 0 else -1]:
            runs[side].append(run := sides[side]())
            print(f"{side:<16} {run['seconds']:7.1f} s, {run['bytes'] / 1e9:6.2f} GB over the start", file=sys.stderr)
    return {
        side: {name: statistics.median(run[name] for run in each) for name in ("seconds", "bytes", "preemptions")}
        | {"texts": each[0]["texts"], "tokens": each[0]["tokens"]}
        for side, each in runs.items()
    }


def body(question: str, limit: int, **fields: Any) -> dict[str, Any]:
    return {**fields, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": limit}


def chats(clients: int, limit: int, **fields: Any) -> list[list[dict[str, Any]]]:
    texts = [f"What is {n} plus {n + 1}? Answer with one number only." for n in range(clients)]
    return [[body(text, limit, **fields)] for text in texts]


def limits(asked: argparse.Namespace) -> dict[str, Any]:
    ours, theirs = [*OURS, "--model", asked.model], [*MLX_LM, "--model", asked.model]
    sides: dict[str, Callable[[], dict[str, Any]]] = {
        f"ours {limit}": partial(measure, ours, chats(asked.clients, limit)) for limit in asked.limits
    }
    most = min(max(asked.limits), 7000)
    sides["mlx_lm.server"] = partial(measure, theirs, chats(asked.clients, most, model="default_model"))
    got = compare(sides, asked.rounds)
    least, largest, other = got[f"ours {min(asked.limits)}"], got[f"ours {max(asked.limits)}"], got["mlx_lm.server"]
    figures: dict[str, Any] = {f"seconds_{side.replace(' ', '_')}": round(x["seconds"], 2) for side, x in got.items()}
    figures |= {f"gigabytes_{side.replace(' ', '_')}": round(x["bytes"] / 1e9, 3) for side, x in got.items()}
    return figures | {
        "limit_time_ratio": round(largest["seconds"] / least["seconds"], 3),
        "limit_memory_ratio": round(largest["bytes"] / least["bytes"], 3),
        "time_ratio": round(other["seconds"] / largest["seconds"], 3),
        "memory_ratio": round(other["bytes"] / largest["bytes"], 3),
        "same_texts": least["texts"] == largest["texts"],
    }


def preemption(asked: argparse.Namespace) -> dict[str, Any]:
    """Lines and programs; of each answer, 256 tokens are expected at first."""
    with process([*OURS, "--model", asked.model]) as (url, _):
        memory = httpx.get(f"{url}/memory", timeout=60).json()
        worst = 1280 * memory["prompt_memory_limit"] / memory["prompt_memory_tokens"]
    bodies = [
        [
            body(f"What is {n} plus {n + 1}? Answer with one number only.", 1000),
            body(f"Continue this program:\n{SOURCE[700 * n :][:700]}", 400),
            body(f"Name {n} animals in one line.", 1000),
        ]
        for n in range(2, asked.clients + 2)
    ]
    words = [*OURS, "--model", asked.model, "--memory-limit"]
    sides = {
        f"{rows} rows": partial(measure, [*words, str(int(memory["weights"] + rows * worst))], bodies)
        for rows in (3, 6)
    }
    got = compare(sides, asked.rounds)
    speeds = {side: each["tokens"] / each["seconds"] for side, each in got.items()}
    return {
        "tokens_per_second_3_rows": round(speeds["3 rows"], 1),
        "tokens_per_second_6_rows": round(speeds["6 rows"], 1),
        "preemptions_3_rows": got["3 rows"]["preemptions"],
        "preemption_ratio": round(speeds["3 rows"] / speeds["6 rows"], 3),
        "same_texts": got["3 rows"]["texts"] == got["6 rows"]["texts"],
    }


def rows(asked: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of steps, of those with a leave and a join, and of the longest growth."""
    model, tokenizer = mlx_kv.load(asked.model)
    text = tokenizer.encode(SOURCE)

    def make(count: int, tokens: int) -> Any:
        engine = make_engine(model, set(), None, EngineSettings(count))
        for index in range(count):
            submit(engine, index, tokens)
        while len(engine.rows) < count:
            engine.step()
        return engine

    def submit(engine: Any, index: int, tokens: int) -> None:
        engine.submit(TokenSequence(index, text[100 * index :][:8], tokens))

    def time_step(engine: Any, before: Callable[[], object] = bool) -> float:
        started = time.perf_counter()
        before()
        engine.step()
        return (time.perf_counter() - started) * 1000

    took: dict[str, list[float]] = {"step": [], "leave": [], "join": []}
    engine = make(8, 10_000)
    for index in range(20 * asked.rounds):
        took["step"] += [time_step(engine) for _ in range(8)]
        took["leave"].append(time_step(engine, partial(engine.cancel, index)))
        engine.step()
        took["join"].append(time_step(engine, partial(submit, engine, index + 8, 10_000)))
        while engine.pending:
            engine.step()
    engine.close()
    engine = make(2, 7000)
    steps, growths = [], []
    while engine.busy:
        steps.append(time_step(engine))
        growths.append(cache_statistics(engine.caches).growths)
        if len(steps) % 1000 == 0:
            print(f"{len(steps):6} tokens, {sum(steps) / 1000:.0f} s", file=sys.stderr)
    engine.close()
    grown = [at for at in range(4, len(steps) - 4) if growths[at] > growths[at - 1]]
    more = [steps[at] - statistics.median([*steps[at - 4 : at], *steps[at + 1 : at + 5]]) for at in grown]
    step = statistics.median(took["step"])
    return {
        "milliseconds_step": round(step, 1),
        "leave_ratio": round(statistics.median(took["leave"]) / step, 2),
        "join_ratio": round(statistics.median(took["join"]) / step, 2),
        "steps_of_7000_tokens": len(steps),
        "growths": len(grown),
        "milliseconds_longest_growth": round(max(more, default=0.0), 1),
        "milliseconds_median_growth": round(statistics.median(more or [0.0]), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory, on a CPU in float32")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--limits", type=lambda text: [*map(int, text.split(","))], default=[64, 7000, 32_000])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--part", choices=["limits", "preemption", "both", "rows"], default="both")
    asked = parser.parse_args()
    line: dict[str, Any] = {"benchmark": "room", "clients": asked.clients, "rounds": asked.rounds}
    if asked.part in ("limits", "both"):
        line |= limits(asked)
    if asked.part in ("preemption", "both"):
        line |= preemption(asked)
    if asked.part == "rows":
        line |= rows(asked)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
