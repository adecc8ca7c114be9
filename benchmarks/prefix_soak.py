"""500 requests over 20 prefixes, with clients that hang up and cancel: every answer is the one of its prompt alone.

    python benchmarks/prefix_soak.py [--requests 500] [--clients 8]

`mlx-kv serve` runs as a process of its own with the bundled reference model, eight rows, and 64 MiB for processed
prompts. Each prompt is one of 20 beginnings and one of 5 endings, so that rows share first tokens all the time. First
each prompt is answered alone, one after the other. Then clients send them at once: one in ten hangs up in the middle of
a stream, one in ten before the answer begins. At the end no row may be left, and MLX's bytes beside the processed
prompts are those from before.

The last line is one JSON object; the exit code is 1 if an answer differs, or bytes are left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from soak import SOURCE, Serving, idle, metrics

PREFIXES, ENDINGS = 20, 5
OPTIONS = ("--max-batch-size", "8", "--prompt-memory-bytes", str(2**26))
SLACK = 2**21  # bytes of MLX that may differ: a tenth of what it holds beside prompts


def prompts() -> list[str]:
    beginnings = [SOURCE[start : start + 1500] for start in range(0, 500 * PREFIXES, 500)]
    return [f"{text}\n\ndef part_{number}(" for text in beginnings for number in range(ENDINGS)]


def body(prompt: str, **others: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, **others}


def request(client: httpx.Client, number: int, texts: list[str], alone: dict[str, str]) -> str:
    """One request, and how it ended."""
    chance = random.Random(number)
    prompt, kind = chance.choice(texts), chance.randrange(10)
    if kind == 0:
        with client.stream("POST", "/v1/completions", json=body(prompt, stream=True, max_tokens=500)) as answer:
            next(answer.iter_bytes())
        return "hung up"
    if kind == 1:
        with contextlib.suppress(httpx.TimeoutException):
            client.post("/v1/completions", json=body(prompt, max_tokens=500), timeout=chance.uniform(0.01, 0.3))
        return "cancelled"
    answer = client.post("/v1/completions", json=body(prompt))
    if answer.status_code != 200:
        return f"unexpected {answer.status_code}"
    return "alike" if answer.json()["choices"][0]["text"] == alone[prompt] else "different"


def left(found: dict[str, float]) -> float:
    """Bytes that MLX holds beside processed prompts."""
    return found["mlx_kv_active_memory_bytes"] - found["mlx_kv_prompt_memory_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    serving, texts, started = Serving(OPTIONS), prompts(), time.perf_counter()
    ends: dict[str, int] = {}
    most = 0.0
    with httpx.Client(base_url=serving.url, timeout=120) as client, ThreadPoolExecutor(options.clients) as pool:
        alone = {}
        for text in texts:
            alone[text] = client.post("/v1/completions", json=body(text)).json()["choices"][0]["text"]
        before = idle(client)
        print(f"{len(texts)} prompts alone: {time.perf_counter() - started:.0f} s", file=sys.stderr)
        jobs = [pool.submit(request, client, number, texts, alone) for number in range(options.requests)]
        for number, job in enumerate(jobs, 1):
            ends[job.result()] = ends.get(job.result(), 0) + 1
            if number % 50 == 0:
                most = max(most, metrics(client)["mlx_kv_kv_bytes_allocated"])
                print(f"{number:5,} requests  {ends}", file=sys.stderr)
        after = idle(client)
    serving.process.terminate()
    serving.process.wait(30)
    line = {
        "benchmark": "prefix_soak",
        "requests": options.requests,
        **{f"requests_{end.replace(' ', '_')}": count for end, count in sorted(({"different": 0} | ends).items())},
        "seconds": round(time.perf_counter() - started, 1),
        "prefix_hits": round(after["mlx_kv_prefix_hits_total"] - before["mlx_kv_prefix_hits_total"]),
        "most_row_bytes_seen": round(most),
        "bytes_before": round(left(before)),
        "bytes_after": round(left(after)),
    }
    print(json.dumps(line))
    bad = [end for end in ends if end == "different" or end.startswith("unexpected")]
    sys.exit(1 if bad or left(after) > left(before) + SLACK else 0)


if __name__ == "__main__":
    main()
