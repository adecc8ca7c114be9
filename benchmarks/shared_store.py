"""Three servers and one store: what they find of each other while one of them is killed.

    python benchmarks/shared_store.py [--requests 300] [--clients 3]

The physics. A prompt of some 300 tokens whose beginning another server has read costs a few reads of files (a listing,
the entry's index, its data and blocks) instead of reading it. Whether it pays depends on the model: what is shown here
is that it works, not what it gains.

Requests come in turn to the three servers; each begins with one of a few system prompts, and greedy answers must be
those of a server that keeps nothing. A third of the way one server is killed (SIGKILL, while it answers), and started
again at two thirds: its clients get an error, and go to the next one. Every server evicts: the store has not room for
all.

What is reported: answers that differ, requests that failed though their server lived (both must be 0), and prompts of
which a server found more than it had read itself. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

SOURCE = (Path(__file__).parent.parent / "mlx_kv" / "cache" / "kv_cache.py").read_text()
SYSTEMS, ENDINGS, SERVERS = 6, 8, 3
ROOM = 24 * 2**20  # bytes of the store: not for all of it


class Server:
    """`mlx-kv serve` as a process of its own."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlx_kv.cli", "serve", "--port", "0", *self._options],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stderr is not None
        self.notes = []
        while " at http://" not in (line := self.process.stderr.readline()):
            assert line, "the server did not start: " + "".join(self.notes)
            self.notes.append(line)
        self.http = httpx.Client(base_url=line.split(" at ")[1].split("/v1")[0], timeout=120)
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def ask(self, prompt: str) -> tuple[str, int, float]:
        """The answer, tokens of the prompt that had been read before, and seconds."""
        began = time.perf_counter()
        answer = self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8})
        assert answer.status_code == 200, answer.text
        told = answer.json()
        cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        return told["choices"][0]["text"], cached, time.perf_counter() - began

    def kill(self, how: int = signal.SIGKILL) -> None:
        self.process.send_signal(how)
        self.process.wait(30)


def prompt(number: int) -> str:
    chance = random.Random(number)
    system, ending = chance.randrange(SYSTEMS), chance.randrange(ENDINGS)
    return f"# {system}\n{SOURCE[system * 900 : system * 900 + 900]}\n# {ending}\ndef part_{ending}("


def serve_all(servers: list[Server], options: argparse.Namespace, wanted: dict[str, str]) -> dict[str, Any]:
    """All requests, to the servers in turn; one of these is killed on the way, and started again."""
    counts, found = Counter[str](), 0
    seen: list[set[str]] = [set() for _ in servers]
    lock = threading.Lock()

    def one(number: int) -> None:
        nonlocal found
        text = prompt(number)
        for turn in range(SERVERS):
            which = (number + turn) % SERVERS
            try:
                answer, cached, _ = servers[which].ask(text)
            except httpx.TransportError:
                with lock:
                    counts["turned away by the one that was killed" if which == 0 else "failed"] += 1
                continue
            with lock:
                counts["same" if answer == wanted[text] else "different"] += 1
                system = text[:40]
                if cached > 64 and system not in seen[which]:
                    found += 1  # this server has not read this beginning itself
                seen[which].add(system)
            return
        counts["nobody answered"] += 1

    first, second = options.requests // 3, 2 * options.requests // 3
    thirds = [range(first), range(first, second), range(second, options.requests)]
    with ThreadPoolExecutor(options.clients) as pool:
        for index, third in enumerate(thirds):
            work = [pool.submit(one, number) for number in third]
            if index == 1:
                time.sleep(0.3)
                servers[0].kill()
            for each in work:
                each.result()
            if index == 1:
                servers[0].start()
                seen[0] = set()
    return {**counts, "beginnings_of_others_found": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--clients", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        alone = Server("--prompt-memory-bytes", "0")
        wanted = {text: alone.ask(text)[0] for text in {prompt(number) for number in range(options.requests)}}
        alone.kill()
        servers = [Server("--prompt-store", folder, "--prompt-store-bytes", str(ROOM)) for _ in range(SERVERS)]
        try:
            told = serve_all(servers, options, wanted)
        finally:
            for server in servers:
                server.process.kill()
                server.process.wait()
    failed = told.get("different", 0) + told.get("failed", 0) + told.get("nobody answered", 0)
    print(json.dumps({"benchmark": "shared_store", "requests": options.requests, **told}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
