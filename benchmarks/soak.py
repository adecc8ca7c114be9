"""What 2,000 short requests, clients that hang up, and a server that fails leave behind: nothing, and nobody waiting.

    python benchmarks/soak.py [--requests 2000] [--clients 8]

`mlx-kv serve` runs as a process of its own with the bundled reference model and a budget, so that rows join, compact
and leave all the time; processed prompts are kept in 16 MiB, so that these come and go, too. Prompts and answers have
mixed lengths; one client in ten hangs up in the middle, one request in ten is malformed. After every hundredth of the
requests the server's resident memory (VmRSS of /proc) and the bytes that MLX holds in arrays (from /metrics) are read,
while all clients wait: rows that live would count otherwise.

Eight times a step fails, while rows decode: these end with an error, and the engine is made anew. Twice, a tenth of the
way and at the very end, the worker's thread is killed among requests that decode or wait: all of them must end with an
error that says so, and the process with exit code 1; the first time the server is started again, as a supervisor would.
A request that has not ended after two minutes is left hanging.

Flat means: the median of the last tenth within 5% of the median of the tenth after warm-up (the first fifth does not
count), of the second process, failed steps included. At the end no row may be left, no byte of keys and values, and all
requests must be accounted for. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

SOURCE = (Path(__file__).parent.parent / "mlx_kv" / "cache" / "kv_cache.py").read_text()
PARTS = 100
KILLED = (PARTS // 10, PARTS - 1)  # parts in which the worker's thread is killed
FAILING = range(PARTS // 4, PARTS - 1, PARTS // 10)  # in which a step fails
PROMPT_MEMORY = 16 * 2**20  # bytes; full long before the warm-up has ended
OPTIONS = ("--kv-budget", "128", "--max-batch-size", "8", "--prompt-memory-bytes", str(PROMPT_MEMORY))


def request(client: httpx.Client, number: int) -> str:
    """One request, and how it ended."""
    try:
        return asked(client, number)
    except httpx.TimeoutException:
        return "left hanging"
    except httpx.HTTPError as error:  # a server that ends tells all who have come, and then takes nobody more
        return "turned away" if isinstance(error, httpx.ConnectError) else f"unexpected {type(error).__name__}"


def asked(client: httpx.Client, number: int) -> str:
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
    if '"error"' in answer.text and answer.status_code in (200, 500, 503):
        whole = answer.status_code != 200 or answer.text.endswith("[DONE]\n\n")
        return "ended with an error" if whole else "unexpected end of a stream"
    good = answer.status_code == 200 and ("[DONE]" in answer.text or answer.json()["choices"][0]["finish_reason"])
    return "answered" if good else f"unexpected {answer.status_code}"


def serve_and_fail() -> None:
    """`mlx-kv serve`, but SIGUSR1 makes a step fail, and SIGUSR2 kills the worker's thread, while two rows decode."""
    from mlx_kv.cli import main as cli
    from mlx_kv.server.rows import Rows

    wanted: list[BaseException] = []
    deliver = Rows._deliver

    def fails(self: Rows, tokens: Any) -> None:
        deliver(self, tokens)
        if wanted and len(self.active) > 1:
            raise wanted.pop()

    Rows._deliver = fails  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, lambda number, frame: wanted.append(RuntimeError("made to fail")))
    signal.signal(signal.SIGUSR2, lambda number, frame: wanted.append(SystemExit("killed")))
    sys.argv.remove("--serve")
    sys.argv.insert(1, "serve")
    cli.main()


class Serving:
    """The server, as a process; what it logs is thrown away but for the last line.

    Args:
        options: of `mlx-kv serve`.
        program: which serves with the option --serve.
    """

    def __init__(self, options: Sequence[str] = OPTIONS, program: str = __file__) -> None:
        words = [sys.executable, program, "--serve", "--port", "0", *options]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        while " at http" not in (line := self.process.stderr.readline()):
            assert line, "the server has ended"
        self.url = line.split(" at ")[1].split("/v1")[0]
        self.last = ""
        threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True).start()

    def _read(self, log: Any) -> None:
        for line in log:
            self.last = line.strip()


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
    if options.requests < PARTS * 2:
        parser.error(f"at least {PARTS * 2} requests")
    serving = Serving()
    codes = []
    ends: dict[str, int] = {}
    residents, actives = [], []
    started = time.perf_counter()
    per_part = options.requests // PARTS
    with ThreadPoolExecutor(options.clients) as pool:
        for part in range(PARTS):
            with httpx.Client(base_url=serving.url, timeout=120) as client:
                if part in KILLED:
                    os.kill(serving.process.pid, signal.SIGUSR2)
                elif part in FAILING:
                    os.kill(serving.process.pid, signal.SIGUSR1)
                for end in pool.map(request, [client] * per_part, range(part * per_part, (part + 1) * per_part)):
                    ends[end] = ends.get(end, 0) + 1
                if part in KILLED:
                    codes.append(serving.process.wait(30))
                    assert "its worker died of SystemExit: killed" in serving.last, serving.last
                    if part != KILLED[-1]:
                        serving = Serving()
                    continue
                found = idle(client)
            residents.append(resident(serving.process.pid))
            actives.append(found["mlx_kv_active_memory_bytes"])
            if part % 10 == 8:
                print(
                    f"{(part + 1) * per_part:6,} requests  resident {residents[-1] / 1e6:7.1f} MB  "
                    f"MLX {actives[-1] / 1e6:6.2f} MB",
                    file=sys.stderr,
                )
        seconds = time.perf_counter() - started

    def change(series: list[float] | list[int]) -> float:
        after_warm_up, end = series[PARTS // 5 : 3 * PARTS // 10], series[-PARTS // 10 :]
        return statistics.median(end) / statistics.median(after_warm_up) - 1

    line = {
        "benchmark": "soak",
        "requests": sum(ends.values()),
        **{f"requests_{end.replace(' ', '_')}": count for end, count in sorted(({"left hanging": 0} | ends).items())},
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
        "workers_killed": len(KILLED),
        "exit_codes": codes,
    }
    print(json.dumps(line))
    bad = [end for end in ends if end.startswith("unexpected") or end == "left hanging"]
    flat = abs(change(residents)) <= 0.05 and abs(change(actives)) <= 0.05
    sys.exit(0 if flat and not bad and codes == [1, 1] and line["engine_failures"] == len(FAILING) else 1)


if __name__ == "__main__":
    serve_and_fail() if "--serve" in sys.argv else main()
