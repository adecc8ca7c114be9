"""Several models in one server, under a memory limit that holds two of three: answers, and pauses while one is loaded.

    python benchmarks/models.py --model build/smollm2 --small build/smollm2-4bit
    python benchmarks/models.py --model build/smollm2 --small build/smollm2-4bit --part pauses

soak: clients send random requests: short answers to some prompts, streams that they leave, unloads, `keep_alive` 0; in
the middle the server is killed (-9) and starts again with its store. Each answer is compared with that of a server of
one model. pauses: three streams of a model, while a request to another one, as large, makes it load and read a prompt;
the longest time between two pieces of text, beside that of the same streams alone. One JSON line last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

TEXT = (Path(__file__).parent.parent / "tests" / "source.txt").read_text()
PROMPTS = [TEXT[start : start + 270] for start in range(0, 2_160, 270)]  # some 80 tokens each
LIMIT = 1.02  # of the two largest models
PORT = 9_311
PATIENCE = 600  # seconds


@contextlib.contextmanager
def server(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`mlx-kv serve` with these words; it is ended by the caller or here."""
    log = (folder / "server.log").open("a")
    command = [sys.executable, "-m", "mlx_kv.cli", "serve", "--port", str(PORT), "--max-queue", "200", *words]
    process = subprocess.Popen(command, stderr=log, text=True)
    try:
        for _ in range(PATIENCE):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{PORT}/ready", timeout=5).status_code == 200:
                    break
            if process.poll() is not None:
                sys.exit((folder / "server.log").read_text())
            time.sleep(1)
        yield process
    finally:
        process.kill()
        process.wait()


def client() -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=PATIENCE)


def complete(http: httpx.Client, model: str, prompt: str, tokens: int) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return http.post("/v1/completions", json=body)


def models_of(arguments: argparse.Namespace) -> dict[str, str]:
    return {"large": arguments.model, "small": arguments.small, "reference": "reference"}


def config(folder: Path, models: dict[str, str], limit: int | None) -> Path:
    """A configuration file with these models."""
    lines = [f'memory-limit = "{limit}"'] if limit is not None else []
    lines += [f'[models.{name}]\npath = "{path}"' for name, path in models.items()]
    file = folder / f"{len(models)}.toml"
    file.write_text("\n".join(lines))
    return file


def sizes(folder: Path, models: dict[str, str]) -> dict[str, int]:
    """Bytes of the weights of each model."""
    with server(folder, "--config", str(config(folder, models, None))), client() as http:
        return {each["id"]: each["bytes"] for each in http.get("/v1/models").json()["data"] if each["id"] in models}


def alone(folder: Path, name: str, path: str, tokens: Sequence[int]) -> dict[tuple[str, str, int], str]:
    """What a model answers in a server of its own."""
    with server(folder, "--config", str(config(folder, {name: path}, None))), client() as http:
        found = {}
        for prompt in PROMPTS:
            text = complete(http, name, prompt, max(tokens)).json()["choices"][0]["text"]
            for count in tokens:
                found[name, prompt, count] = text if count == max(tokens) else ""
        for (_, prompt, count), text in list(found.items()):
            if not text:
                found[name, prompt, count] = complete(http, name, prompt, count).json()["choices"][0]["text"]
        return found


class Soak:
    """Random requests, and what came of them."""

    def __init__(self, models: dict[str, str], wanted: dict[tuple[str, str, int], str], tokens: Sequence[int]) -> None:
        self._names, self._wanted, self._tokens = list(models), wanted, tokens
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._lock, self.up = threading.Lock(), threading.Event()
        self.up.set()

    def note(self, what: str, problem: str = "") -> None:
        with self._lock:
            self.counts[what] += 1
            if problem:
                self.problems.append(f"{what}: {problem}")

    def request(self, draw: random.Random, http: httpx.Client) -> None:
        """One request, repeated if the server is killed meanwhile."""
        name, prompt, count = draw.choice(self._names), draw.choice(PROMPTS), draw.choice(self._tokens)
        kind = draw.random()
        while True:
            self.up.wait()
            try:
                self._send(kind, http, name, prompt, count)
                return
            except httpx.TransportError as error:
                self.note("connection lost")
                if self.up.is_set() and self._names and not self._dies():
                    self.note("unexpected", repr(error))
                    return

    def _dies(self) -> bool:
        """Whether the server is down, or was a moment ago."""
        time.sleep(0.5)
        return not self.up.is_set() or self.counts["kill"] > 0

    def _send(self, kind: float, http: httpx.Client, name: str, prompt: str, count: int) -> None:
        if kind < 0.06:
            answer = http.post("/models/unload", json={"model": name})
            self.note(f"unload {answer.status_code}", "" if answer.status_code in (200, 503) else answer.text)
        elif kind < 0.12:
            body = {"model": name, "prompt": prompt, "keep_alive": 0, "stream": False, "raw": True}
            answer = http.post("/api/generate", json=body | {"options": {"num_predict": count, "temperature": 0}})
            self.compare("keep_alive", answer, answer.json().get("response"), name, prompt, count)
        elif kind < 0.22:
            body = {"model": name, "prompt": prompt, "max_tokens": 400, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as streamed:
                next(streamed.iter_bytes(), None)
            self.note("hang-up")
        else:
            answer = complete(http, name, prompt, count)
            choices = answer.json().get("choices")
            self.compare("answer", answer, choices and choices[0]["text"], name, prompt, count)
            if answer.status_code == 200 and answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]:
                self.note("reused")

    def compare(self, kind: str, answer: httpx.Response, text: Any, name: str, prompt: str, count: int) -> None:
        if answer.status_code != 200:
            self.note(f"{kind} {answer.status_code}", answer.text[:300])
        elif text != self._wanted[name, prompt, count]:
            self.note(f"{kind} differs", f"{name}, {count}: {text!r} is not {self._wanted[name, prompt, count]!r}")
        else:
            self.note(kind)


def soak(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All of it."""
    models, tokens = models_of(arguments), (3, 8, 14)
    largest = sorted(sizes(folder, models).values())[-2:]
    limit = int(LIMIT * sum(largest))
    wanted: dict[tuple[str, str, int], str] = {}
    for name, path in models.items():
        wanted |= alone(folder, name, path, tokens)
        print(f"{name} alone: {len(PROMPTS)} prompts", flush=True)
    words = ("--config", str(config(folder, models, limit)), "--prompt-store", str(folder / "store"))
    run, started = Soak(models, wanted, tokens), time.monotonic()
    todo = iter(range(arguments.requests))

    def work(seed: int) -> None:
        draw = random.Random(seed)
        with client() as http:
            for number in todo:
                run.request(draw, http)
                if number % 100 == 0:
                    print(f"{number} of {arguments.requests}: {dict(run.counts)}", flush=True)

    with ThreadPoolExecutor(arguments.clients) as pool:
        with server(folder, *words):
            clients = [pool.submit(work, seed) for seed in range(arguments.clients)]
            while sum(run.counts.values()) < arguments.requests // 2:
                time.sleep(0.5)
            run.up.clear()
            run.note("kill")
        with server(folder, *words), client() as http:
            run.up.set()
            for each in clients:
                each.result()
            left = settle(http, models)
            found = found_again(http, models, run)
    seconds = time.monotonic() - started
    result = {"limit": limit, "seconds": round(seconds), **left, "found_again": found, "counts": dict(run.counts)}
    for problem in run.problems[:20]:
        print("PROBLEM", problem)
    return result | {"problems": len(run.problems)}


def settle(http: httpx.Client, models: dict[str, str]) -> dict[str, int]:
    """Bytes that are left when nothing runs and all weights are freed, beside cached prompts."""
    for name in models:
        while http.post("/models/unload", json={"model": name}).status_code != 200:
            time.sleep(0.5)
    time.sleep(2)
    memory = http.get("/memory").json()
    return {"left_bytes": memory["active_memory"] - memory["prompt_memory"], "weights_left": memory["weights"]}


def found_again(http: httpx.Client, models: dict[str, str], run: Soak) -> dict[str, int]:
    """Tokens of a prompt that are reused by each model after it was unloaded."""
    found = {}
    for name in models:
        for _ in range(2):
            answer = complete(http, name, PROMPTS[0], 3)
            http.post("/models/unload", json={"model": name})
        found[name] = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def pauses(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The longest time between two pieces of three streams, with another model that loads, and without."""
    same = folder / "same"
    same.symlink_to(Path(arguments.model).resolve())
    models = {"small": str(same), "large": arguments.model}
    result: dict[str, Any] = {}
    with server(folder, "--config", str(config(folder, models, None))), client() as http:
        for _ in range(2):  # kernels, files in the system's memory
            complete(http, "large", PROMPTS[0], 2)
            http.post("/models/unload", json={"model": "large"})
        for what in ("alone", "beside a load", "alone", "beside a load"):
            http.post("/models/unload", json={"model": "large"})
            seconds = round(longest_pause("small", "large" if what != "alone" else None), 3)
            result.setdefault(what, []).append(seconds)
            print(f"{what}: {seconds} s", flush=True)
    return result


def longest_pause(own: str, other: str | None) -> float:
    times: list[list[float]] = [[], [], []]

    def stream(number: int) -> None:
        body = {"model": own, "prompt": PROMPTS[number], "max_tokens": 120, "stream": True, "temperature": 0}
        with client() as http, http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    times[number].append(time.monotonic())

    with ThreadPoolExecutor(4) as pool, client() as http:
        streams = [pool.submit(stream, number) for number in range(3)]
        while not all(len(each) > 10 for each in times):
            time.sleep(0.02)
        if other is not None:
            complete(http, other, TEXT[:2_000], 8)
        for each in streams:
            each.result()
    return max(after - before for each in times for before, after in pairwise(each[10:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model of some hundred megabytes")
    parser.add_argument("--small", required=True, help="another one, such as the same in 4 bits")
    parser.add_argument("--part", choices=("soak", "pauses"), help="default: both")
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--clients", type=int, default=8)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"benchmark": "models"}
    parts = {"pauses": pauses, "soak": soak}
    for name in [arguments.part] if arguments.part else parts:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = parts[name](arguments, Path(folder))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
