"""500 requests over 20 prefixes, with clients that hang up and cancel: every answer is the one of its prompt alone.

    python benchmarks/prefix_soak.py [--requests 500] [--clients 8] [--options "--kv-budget 500 --kv-margin 60"]
    python benchmarks/prefix_soak.py --requests 2000 --prefixes 40 --memory-limit 48000000 [--unlimited]

`mlx-kv serve` runs as a process of its own with the bundled reference model, eight rows, and 64 MiB for processed
prompts. Each prompt is one of 20 beginnings and one of 5 endings, so that rows share first tokens all the time. First
each prompt is answered alone, one after the other. Then clients send them at once: one in ten hangs up in the middle of
a stream, one in ten before the answer begins. At the end no row may be left, and MLX's bytes beside the processed
prompts are those from before.

With `--memory-limit`, cached prompts have what rows leave of it, and prompts and answers have mixed lengths. Every
tenth of a second the server's process samples MLX's active memory, the freed buffers that MLX keeps
(`mx.get_cache_memory`), the peak, and resident memory (VmRSS of /proc); the table has medians of each tenth of the
requests. MLX's own cache limit is first set to `--own-limit`, as on a Mac, where it is about the memory of the device;
on a CPU it is 32 MiB. The server then sets its own from the memory limit; `--unlimited` leaves that out, for
comparison. Compared are the third to sixth tenth with the last four: the median of active and freed memory, which moves
by 10% from one tenth to the next with the prompts in it, may grow by 5%.

The last line is one JSON object; the exit code is 1 if an answer differs, bytes are left, or memory grew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from soak import SOURCE, Serving, idle, metrics, resident

ENDINGS = 5
OPTIONS = ("--max-batch-size", "8", "--prompt-memory-bytes", str(2**26))
SLACK = 2**21  # bytes of MLX that may differ: a tenth of what it holds beside prompts
PARTS, WARM, COMPARED = 10, 2, 4  # of the requests; the third part is the first that counts
SAMPLED = "MLX_KV_SOAK"  # the environment variable with the file for samples, MLX's limit, and whether that stays


# --- the server's process ---------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """Bytes of the server's process at a time of the monotonic clock."""

    time: float
    active: int
    freed: int
    peak: int
    resident: int


def serve_and_sample() -> None:
    """`mlx-kv serve`, which writes samples to a file."""
    from mlx_kv.cli import main as cli

    # isort: split
    import mlx.core as mx

    file, own_limit, unlimited = json.loads(os.environ[SAMPLED])
    mx.set_cache_limit(own_limit)
    if unlimited:
        from mlx_kv.server.memory import FreedMemory

        FreedMemory.begin = lambda self, server, for_rows: None  # type: ignore[method-assign]

    def sample() -> None:
        with open(file, "w", buffering=1) as samples:
            while True:
                taken = mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory(), resident(os.getpid())
                samples.write(json.dumps([time.monotonic(), *taken]) + "\n")
                time.sleep(0.1)

    threading.Thread(target=sample, daemon=True).start()
    sys.argv.remove("--serve")
    sys.argv.insert(1, "serve")
    cli.main()


class Sampled(Serving):
    """A server that samples its memory."""

    def __init__(self, options: Sequence[str], own_limit: int, unlimited: bool) -> None:
        self.file = Path(tempfile.mkstemp(suffix=".jsonl")[1])
        os.environ[SAMPLED] = json.dumps([str(self.file), own_limit, unlimited])
        super().__init__(options, __file__)

    def samples(self) -> list[Sample]:
        """All samples; the file is removed."""
        lines = self.file.read_text().splitlines()
        self.file.unlink()
        return [Sample(*json.loads(line)) for line in lines]


# --- clients ----------------------------------------------------------------------------------------------------------


def prompts(prefixes: int, mixed: bool) -> list[str]:
    """All prompts.

    Args:
        mixed: beginnings of 300 to 1,500 characters, not 1,500.
    """
    text = SOURCE + (Path(__file__).parent.parent / "mlx_kv" / "cache" / "state.py").read_text()
    lengths = [300 + number * 370 % 1200 if mixed else 1500 for number in range(prefixes)]
    assert len(text) > 500 * prefixes + max(lengths)
    beginnings = [text[500 * number : 500 * number + length] for number, length in enumerate(lengths)]
    return [f"{text}\n\ndef part_{number}(" for text in beginnings for number in range(ENDINGS)]


def body(prompt: str, **others: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, **others}


def request(client: httpx.Client, number: int, texts: list[str], alone: dict[str, str], mixed: bool) -> str:
    """One request, and how it ended."""
    chance = random.Random(number)
    prompt, kind = chance.choice(texts), chance.randrange(10)
    longest = 60 if mixed else 500  # tokens of an answer that is given up
    tokens = chance.randrange(2, 13) if mixed else 24
    if kind == 0:
        with client.stream("POST", "/v1/completions", json=body(prompt, stream=True, max_tokens=longest)) as answer:
            next(answer.iter_bytes())
        return "hung up"
    if kind == 1:
        with contextlib.suppress(httpx.TimeoutException):
            client.post("/v1/completions", json=body(prompt, max_tokens=longest), timeout=chance.uniform(0.01, 0.3))
        return "cancelled"
    answer = client.post("/v1/completions", json=body(prompt, max_tokens=tokens))
    if answer.status_code != 200:
        return f"unexpected {answer.status_code}"
    text = answer.json()["choices"][0]["text"]
    alike = alone[prompt].startswith(text) if mixed else text == alone[prompt]
    return "alike" if alike else "different"


def left(found: dict[str, float]) -> float:
    """Bytes that MLX holds beside processed prompts."""
    return found["mlx_kv_active_memory_bytes"] - found["mlx_kv_prompt_memory_bytes"]


def settled(client: httpx.Client) -> dict[str, float]:
    """The metrics when no row is left, with the least memory of five times: the last row may still be counted."""
    found = []
    for _ in range(5):
        client.post("/v1/completions", json={"prompt": "import", "max_tokens": 1})
        time.sleep(0.5)
        found.append(idle(client))
    return min(found, key=left)


# --- memory over time -------------------------------------------------------------------------------------------------


def by_part(samples: Sequence[Sample], ends: Sequence[float]) -> list[list[Sample]]:
    """The samples of each part of the requests.

    Args:
        ends: when each part began, and the last one ended.
    """
    return [[each for each in samples if first <= each.time < last] for first, last in pairwise(ends)]


def together(samples: Sequence[Sample]) -> float:
    return statistics.median(each.active + each.freed for each in samples)


def memory_figures(parts: Sequence[Sequence[Sample]], most: int) -> dict[str, Any]:
    """Prints a table, and returns the figures for the last line."""
    print("requests  active MB  freed MB  together MB  resident MB", file=sys.stderr)
    for number, part in enumerate(parts, 1):
        active, freed, held = (statistics.median(each[i] for each in part) for i in (1, 2, 4))
        figures = f"{active / 1e6:9.1f}  {freed / 1e6:8.1f}  {together(part) / 1e6:11.1f}  {held / 1e6:11.1f}"
        print(f"{number * most // PARTS:8,}  {figures}", file=sys.stderr)
    first, last = ([each for part in some for each in part] for some in (parts[WARM:][:COMPARED], parts[-COMPARED:]))
    counted = first + last
    return {
        "samples": len(counted),
        "active_bytes_after_warm_up": round(statistics.median(each.active for each in first)),
        "active_bytes_at_the_end": round(statistics.median(each.active for each in last)),
        "freed_bytes_after_warm_up": round(statistics.median(each.freed for each in first)),
        "freed_bytes_at_the_end": round(statistics.median(each.freed for each in last)),
        "most_freed_bytes": max(each.freed for each in counted),
        "most_bytes_together": max(each.active + each.freed for each in counted),
        "peak_bytes": last[-1].peak,
        "together_change": round(together(last) / together(first) - 1, 4),
        "resident_bytes_after_warm_up": round(statistics.median(each.resident for each in first)),
        "resident_bytes_at_the_end": round(statistics.median(each.resident for each in last)),
    }


def evicted(client: httpx.Client) -> int:
    """Prompts of which a cached prefix had been removed to make room."""
    lines = client.get("/metrics").text.splitlines()
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'shortfalls_total{reason="evicted"}' in line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prefixes", type=int, default=20)
    parser.add_argument("--options", default="", help="more options of the server, such as '--kv-budget 300'")
    parser.add_argument("--memory-limit", type=int, help="of the server, in bytes")
    parser.add_argument("--own-limit", type=int, default=2**34, help="MLX's own cache limit, in bytes")
    parser.add_argument("--unlimited", action="store_true", help="leave MLX's own cache limit")
    options = parser.parse_args()
    mixed = options.memory_limit is not None
    limit = ("--memory-limit", str(options.memory_limit)) if mixed else ()
    given = (*OPTIONS, *limit, *shlex.split(options.options))
    serving = Sampled(given, options.own_limit, options.unlimited) if mixed else Serving(given)
    texts, started = prompts(options.prefixes, mixed), time.perf_counter()
    ends: dict[str, int] = {}
    most = 0.0
    with httpx.Client(base_url=serving.url, timeout=600) as client, ThreadPoolExecutor(options.clients) as pool:
        alone = {}
        for text in texts:
            answer = client.post("/v1/completions", json=body(text, max_tokens=12 if mixed else 24))
            alone[text] = answer.json()["choices"][0]["text"]
        before = settled(client)
        print(f"{len(texts)} prompts alone: {time.perf_counter() - started:.0f} s", file=sys.stderr)
        times = [time.monotonic()]
        jobs = [pool.submit(request, client, number, texts, alone, mixed) for number in range(options.requests)]
        for number, job in enumerate(jobs, 1):
            ends[job.result()] = ends.get(job.result(), 0) + 1
            if number % max(1, options.requests // PARTS) == 0:
                times.append(time.monotonic())
                most = max(most, metrics(client)["mlx_kv_kv_bytes_allocated"])
                print(f"{number:5,} requests  {ends}", file=sys.stderr)
        after, removed = settled(client), evicted(client)
        report = client.get("/memory").json()
    serving.process.terminate()
    try:
        serving.process.wait(30)
    except subprocess.TimeoutExpired:
        serving.process.kill()
    line = {
        "benchmark": "prefix_soak",
        "requests": options.requests,
        **{f"requests_{end.replace(' ', '_')}": count for end, count in sorted(({"different": 0} | ends).items())},
        "seconds": round(time.perf_counter() - started, 1),
        "prefix_hits": round(after["mlx_kv_prefix_hits_total"] - before["mlx_kv_prefix_hits_total"]),
        "prefixes_evicted": removed,
        "most_row_bytes_seen": round(most),
        "bytes_before": round(left(before)),
        "bytes_after": round(left(after)),
    }
    if isinstance(serving, Sampled):
        limits = {"memory_limit": options.memory_limit, "weights": report["weights"]}
        line |= {**limits, "freed_limit": report["freed_memory_limit"]}
        line |= memory_figures(by_part(serving.samples(), times), options.requests)
    print(json.dumps(line))
    bad = [end for end in ends if end == "different" or end.startswith("unexpected")]
    grows = line.get("together_change", 0) > 0.05
    sys.exit(1 if bad or left(after) > left(before) + SLACK or grows else 0)


if __name__ == "__main__":
    serve_and_sample() if "--serve" in sys.argv else main()
