"""Servers for tests: in threads of this process, or as a process of their own; and what to ask them."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import mlx.nn as nn
import openai

from mlx_kv import CachePolicy, PromptStore
from mlx_kv.bundled import model_path
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.mlxlm.loading import load, release_weights
from mlx_kv.server.api import AccessRules, Api, HttpSettings, Limits
from mlx_kv.server.monitor import Metrics
from mlx_kv.server.rows import Models, Rows, WorkerSettings
from mlx_kv.server.run import Server, bound
from mlx_kv.server.served import Served
from mlx_kv.server.worker import Worker

SOURCE = (Path(__file__).parent.parent / "source.txt").read_text()
LONG = (SOURCE * (1 + 5000 // len(SOURCE)))[:5000]  # some 1,400 tokens
ENDS = ("\n\ndef first():", "\n\nclass Second:", "\n\nimport", "\n\nreturn")
PLENTY = 2**28


@dataclass
class Running:
    """A server at work, in threads of this process."""

    url: str
    worker: Worker
    api: Api
    metrics: Metrics

    @property
    def rows(self) -> Rows:
        return self.worker.default.rows

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: str, max_tokens: int = 24, **options: Any) -> str:
        answer = self.post(prompt=prompt, max_tokens=max_tokens, **options)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def wait_until(self, what: Callable[[], bool], seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"did not happen in {seconds} s: {self.worker.monitor.snapshot}"
            time.sleep(0.02)

    def wait_until_empty(self) -> None:
        """No row is left, neither in the engine nor in the snapshot, and nobody holds a place."""
        self.wait_until(lambda: not self.rows.active and not self.worker._waiting and not self.rows.engine.busy)
        self.wait_until(
            lambda: (
                not self.worker.monitor.snapshot.decoding
                and self.worker.monitor.snapshot.occupancy.bytes_allocated == 0
            )
        )
        self.wait_until(lambda: self.api.admission.admitted == 0 and not self.api.admission.jobs)

    def in_worker(self, function: Callable[[], None]) -> None:
        """Runs a function in the worker's thread."""
        done = threading.Event()
        self.worker._inbox.put(lambda: (function(), done.set())[1])
        assert done.wait(20)

    def wait_until_kept(self) -> None:
        """What was read for answers that have ended is in memory, and on the disk."""
        self.in_worker(lambda: None)
        self.rows.prefixes._disk.submit(int).result()


def release(network: nn.Module) -> None:
    """Frees the weights of a bundled model."""
    name = "reference" if network.args.hidden_size == 256 else "draft"
    release_weights(network, lambda: load(model_path(name), lazy=True)[0])


@contextlib.contextmanager
def running(
    policy: CachePolicy | None = None,
    max_batch_size: int = 16,
    prefill_step_size: int | None = None,
    limits: Limits | None = None,
    keys: tuple[str, ...] = (),
    draft: bool = False,
    prompt_memory_bytes: int = 0,
    open_store: Any = None,
    change: Callable[[Any], Any] = lambda tokenizer: tokenizer,
    access: AccessRules | None = None,
    drafting: DraftSettings | None = None,
    sampling: SamplingSettings | None = None,
    memory_limit: int | None = None,
    idle_seconds: float | None = None,
    lazy: bool = False,
    chosen: Callable[[nn.Module], CachePolicy | None] = lambda model: None,
    strict_names: bool = False,
) -> Iterator[Running]:
    def models() -> Models:
        model, tokenizer = load(model_path("reference"), lazy=lazy)
        drafts = load(model_path("draft"), lazy=lazy)[0] if draft else None
        return Models(model, change(tokenizer), drafts, sampling or SamplingSettings(), chosen(model))

    settings = WorkerSettings(
        policy or CachePolicy(),
        max_batch_size,
        prefill_step_size,
        drafting=drafting or DraftSettings(),
        prompt_memory_bytes=prompt_memory_bytes,
        open_store=open_store,
        memory_limit=memory_limit,
    )
    served = Served("reference", models, settings, release=release, lazy=lazy, idle_seconds=idle_seconds)
    http = HttpSettings(limits=limits or Limits(), keys=keys, access=access, strict_names=strict_names)
    with running_models([served], http) as one:
        yield one


@contextlib.contextmanager
def running_models(served: Sequence[Served], http: HttpSettings | None = None) -> Iterator[Running]:
    """A server of several models."""
    worker = Worker(served)
    worker.start()
    api = Api(worker, http)
    server = Server(api, drain_seconds=5)
    with bound("127.0.0.1", 0) as listening:
        listening.listen()
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield Running(f"http://127.0.0.1:{listening.getsockname()[1]}", worker, api, worker.metrics)
        finally:
            server.should_exit = True
            thread.join()
            worker.stop()
            assert not worker.alive


def texts(pieces: Any) -> str:
    return "".join(piece.choices[0].text for piece in pieces if piece.choices)


def check_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


class Troubled(PromptStore):
    """A store on a disk that is slow or broken, at will."""

    def __init__(self, path: Path, trouble: str) -> None:
        super().__init__(path, fingerprint="reference")
        self.trouble, self.go_on, self.asked = trouble, threading.Event(), threading.Event()

    def fetch(self, tokens: Sequence[int]) -> Any:
        self.asked.set()
        if self.trouble == "slow":
            assert self.go_on.wait(20)
        if self.trouble == "broken":
            raise RuntimeError("no such device")
        return super().fetch(tokens)

    def write(self, new: Any) -> bool:
        if self.trouble == "full":
            raise OSError(28, "No space left on device")
        return super().write(new)


@contextlib.contextmanager
def command(
    *options: str, program: Sequence[str] = ("-m", "mlx_kv.cli", "serve", "--port", "0"), notes: int = 0
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`mlx-kv serve` as a process, and its address, which it says after so many notes and what memory there is."""
    process = subprocess.Popen([sys.executable, *program, *options], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for _ in range(notes):
            line = process.stderr.readline()
            assert "note: " in line or "--kv-bits auto" in line, line + process.stderr.read()
        line = process.stderr.readline()
        assert "note: " in line
        assert "prompts are kept" in line
        line = process.stderr.readline()
        assert " at http://127.0.0.1:" in line, line + process.stderr.read()
        yield process, line.split(" at ")[1].split("/v1")[0]
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def deaf(url: str, times: int = 1, **options: Any) -> Iterator[socket.socket]:
    """A client that asks for a long stream, or for something else so many times, and takes nothing of it."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    raw.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    body = json.dumps({"prompt": "import os", "max_tokens": 1_000_000, "stream": True} | options).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    raw.sendall(times * (f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body))
    with raw:
        yield raw


SERVE = "import sys; from mlx_kv.cli.main import main; sys.argv[1:] = ['serve', '--port', '0']; "
