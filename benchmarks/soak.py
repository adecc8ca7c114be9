"""What 2,000 short requests leave behind in a server: nothing.

    python benchmarks/soak.py [--requests 2000] [--clients 8]

`mlx-kv serve` runs as a process of its own with the bundled reference model and a budget, so that rows join, compact
and leave all the time; processed prompts are kept in 16 MiB, so that these come and go, too. Prompts and answers have
mixed lengths; one client in ten hangs up in the middle, one request in ten is malformed. After every hundredth of the
requests the server's resident memory (VmRSS of /proc) and the bytes that MLX holds in arrays (from /metrics) are read,
while all clients wait: rows that live would count otherwise.

Flat means: the median of the last tenth within 5% of the median of the tenth after warm-up (the first fifth does not
count). At the end no row may be left, no byte of keys and values, and all requests must be accounted for. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

SOURCE = (Path(__file__).parent.parent / "mlx_kv" / "cache.py").read_text()
PARTS = 100
PROMPT_MEMORY = 16 * 2**20  # bytes; full long before the warm-up has ended


def request(client: httpx.Client, number: int) -> str:
    """One request, and how it ended."""
    chance = random.Random(number)
    start = chance.randrange(len(SOURCE) - 2000)
    body: dict[str, Any] = {
        "prompt": SOURCE[start : start + chance.randrange(20, 1500)],
        "max_tokens": chance.randrange(1, 40),
        "temperature": chance.choice([0, 0.8]),
        "stream": chance.random() < 0.5,
    }
    kind = chance.randrange(10)
    if kind == 0:
        answer = client.post("/v1/completions", json=body | {"max_tokens": "many"})
        return "refused" if answer.status_code == 400 else f"unexpected {answer.status_code}"
    if kind == 1:
        with client.stream("POST", "/v1/completions", json=body | {"stream": True, "max_tokens": 500}) as answer:
            next(answer.iter_bytes())
        return "hung up"
    answer = client.post("/v1/completions", json=body)
    good = answer.status_code == 200 and ("[DONE]" in answer.text or answer.json()["choices"][0]["finish_reason"])
    return "answered" if good else f"unexpected {answer.status_code}"


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def metrics(client: httpx.Client) -> dict[str, float]:
    """Sums over the labels of each metric."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def idle(client: httpx.Client) -> dict[str, float]:
    """The metrics, when no row is left."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = metrics(client)
        if found["mlx_kv_rows"] == found["mlx_kv_requests_waiting"] == found["mlx_kv_kv_bytes_allocated"] == 0:
            return found
        time.sleep(0.05)
    raise SystemExit("a row is left after 30 seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    words = [sys.executable, "-m", "mlx_kv.cli", "serve", "--port", "0", "--kv-budget", "128", "--max-batch-size", "8"]
    words += ["--prompt-memory-bytes", str(PROMPT_MEMORY)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = process.stderr.readline().split(" at ")[1].split("/v1")[0]
    ends: dict[str, int] = {}
    residents, actives = [], []
    started = time.perf_counter()
    per_part = options.requests // PARTS
    with httpx.Client(base_url=url, timeout=120) as client, ThreadPoolExecutor(options.clients) as pool:
        for part in range(PARTS):
            for end in pool.map(lambda n: request(client, n), range(part * per_part, (part + 1) * per_part)):
                ends[end] = ends.get(end, 0) + 1
            found = idle(client)
            residents.append(resident(process.pid))
            actives.append(found["mlx_kv_active_memory_bytes"])
            if part % 10 == 9:
                print(
                    f"{(part + 1) * per_part:6,} requests  resident {residents[-1] / 1e6:7.1f} MB  "
                    f"MLX {actives[-1] / 1e6:6.2f} MB",
                    file=sys.stderr,
                )
        seconds = time.perf_counter() - started
    process.terminate()
    code = process.wait(30)

    def change(series: list[float] | list[int]) -> float:
        after_warm_up, end = series[PARTS // 5 : 3 * PARTS // 10], series[-PARTS // 10 :]
        return statistics.median(end) / statistics.median(after_warm_up) - 1

    line = {
        "benchmark": "soak",
        "requests": sum(ends.values()),
        **{f"requests_{end.replace(' ', '_')}": count for end, count in sorted(ends.items())},
        "seconds": round(seconds, 1),
        "resident_bytes_after_warm_up": round(statistics.median(residents[PARTS // 5 : 3 * PARTS // 10])),
        "resident_bytes_at_the_end": round(statistics.median(residents[-PARTS // 10 :])),
        "resident_change": round(change(residents), 4),
        "mlx_bytes_after_warm_up": round(statistics.median(actives[PARTS // 5 : 3 * PARTS // 10])),
        "mlx_bytes_at_the_end": round(actives[-1]),
        "mlx_change": round(change(actives), 4),
        "rows_finished": round(found["mlx_kv_finished_total"]),
        "tokens_generated": round(found["mlx_kv_generated_tokens_total"]),
        "prompt_memory_bytes": round(found["mlx_kv_prompt_memory_bytes"]),
        "prefix_hits": round(found["mlx_kv_prefix_hits_total"]),
        "tokens_evicted": round(found["mlx_kv_tokens_evicted_total"]),
        "engine_failures": round(found["mlx_kv_engine_failures_total"]),
        "exit_code": code,
    }
    print(json.dumps(line))
    unexpected = [end for end in ends if end.startswith("unexpected")]
    flat = abs(change(residents)) <= 0.05 and abs(change(actives)) <= 0.05
    sys.exit(0 if flat and not unexpected and code == 0 and not line["engine_failures"] else 1)


if __name__ == "__main__":
    main()
