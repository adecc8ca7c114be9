"""How requests end when something of the server ends: its worker, its other threads, or all of it by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from test_completions import ENDS, LONG, Running, Troubled, cached, check_error, command, running

from mlx_kv.server.api import Limits
from mlx_kv.server.shutdown import ShutdownSignals
from mlx_kv.server.task_thread import TaskThread, TaskThreadError


def kill(thread: threading.Thread | None) -> None:
    """Ends a thread from outside, as soon as it executes Python again: no handler of its own expects that."""
    assert thread is not None
    assert thread.ident is not None
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)) == 1


def broken(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("no memory left")


# --- the worker -------------------------------------------------------------------------------------------------------


def no_engine(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step fails, and then the engine cannot be made anew."""
    monkeypatch.setattr("mlx_kv.server.worker.ENGINE_PAUSE", 0.0)
    monkeypatch.setattr("mlx_kv.server.worker.make_engine", broken)
    monkeypatch.setattr(server.worker._engine, "step", broken)


def no_delivery(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be told to clients any longer, not even that."""
    monkeypatch.setattr(server.worker, "deliver", broken)


def a_step_that_exits(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.worker._engine, "step", sys.exit)


def a_kill(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    kill(server.worker._thread)


@contextlib.contextmanager
def held(server: Running) -> Iterator[None]:
    """The worker takes nothing in."""
    holds, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        holds.set()
        go_on.wait(20)

    server.worker._inbox.put(hold)
    assert holds.wait(20)
    try:
        yield
    finally:
        go_on.set()


@pytest.mark.parametrize("death", [no_engine, no_delivery, a_step_that_exits, a_kill])
def test_whatever_the_worker_dies_of_every_request_ends(
    death: Callable[[Running, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that decodes, one that waits for a row, and one that the worker has never heard of."""
    with running(max_batch_size=1) as server, ThreadPoolExecutor(4) as pool:
        body = {"prompt": "import os", "max_tokens": 100_000}
        asked: list[Future[httpx.Response]] = [pool.submit(server.post, **body, stream=True)]
        server.wait_until(lambda: bool(server.worker.snapshot.decoding))
        asked.append(pool.submit(server.post, **body))
        server.wait_until(lambda: len(server.worker._waiting) == 1)
        with held(server):
            asked.append(pool.submit(server.post, **body))
            asked.append(pool.submit(server.post, **body, stream=True))
            server.wait_until(lambda: len(server.api.admission.jobs) == 4)
            death(server, monkeypatch)
        answers = [each.result(20) for each in asked]
        streamed = [answers[0].text, answers[3].text]
        assert all(text.endswith("data: [DONE]\n\n") and '"error"' in text for text in streamed)
        told = check_error(answers[1], 503)["message"]
        assert told == check_error(answers[2], 503)["message"]
        assert told.startswith("the server ends: its worker died of ")
        assert told in streamed[1]
        assert ("no memory left" in told) == (death in (no_engine, no_delivery))
        server.wait_until(lambda: server.api.admission.admitted == 0 and not server.api.admission.jobs)


def test_later_requests_hear_why_there_is_no_worker() -> None:
    with running() as server:
        kill(server.worker._thread)
        server.worker.cancel(server.worker.snapshot)  # type: ignore[arg-type]  # which wakes it
        server.wait_until(lambda: server.api.admission._closing is not None)

        async def ask() -> list[httpx.Response]:
            transport = httpx.ASGITransport(app=server.api.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                body = {"prompt": "import"}
                return [await client.post("/v1/completions", json=body), await client.get("/health")]

        answer, health = asyncio.run(ask())
        assert "its worker died of SystemExit" in check_error(answer, 503)["message"]
        assert health.status_code == 503
        assert health.json() == {"status": "failed", "reason": server.worker.failure}


def test_an_engine_that_can_be_made_at_the_second_try_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_kv.server import worker

    tries, real = [], worker.make_engine

    def second(*arguments: Any, **options: Any) -> Any:
        tries.append(1)
        return broken() if len(tries) == 1 else real(*arguments, **options)

    monkeypatch.setattr(worker, "ENGINE_PAUSE", 0.0)
    with running() as server:
        monkeypatch.setattr(worker, "make_engine", second)
        monkeypatch.setattr(server.worker._engine, "step", broken)
        assert "see its log" in check_error(server.post(prompt="import"), 500)["message"]
        assert server.complete("import", 3)
        assert len(tries) == 2


SERVE = "import sys; from mlx_kv.cli.main import main; sys.argv[1:] = ['serve', '--port', '0']; "
DIES = SERVE + (
    "from mlx_kv.server import worker; worker.Worker._deliver = lambda self, tokens: sys.exit('gone'); main()"
)


def test_the_command_ends_with_its_worker() -> None:
    with command(program=["-c", DIES]) as (process, url):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "import"}, timeout=60)
        assert "its worker died of SystemExit: gone" in check_error(answer, 503)["message"]
        assert process.wait(20) == 1
        assert process.stderr is not None
        *log, line = process.stderr.read().splitlines()
        assert line == "mlx-kv: error: the server has ended: its worker died of SystemExit: gone"
        assert log[0] == "the worker has died"  # and where


# --- its other threads ------------------------------------------------------------------------------------------------


def test_a_clerk_does_one_thing_after_the_other() -> None:
    clerk, done = TaskThread("clerk"), list[int]()
    futures = [clerk.submit(lambda n=n: done.append(n) or n) for n in range(50)]  # type: ignore[misc]
    assert [future.result(20) for future in futures] == done == list(range(50))
    assert isinstance(clerk.submit(broken).exception(20), RuntimeError)
    assert clerk.submit(lambda: 7).result(20) == 7
    clerk.close()
    with pytest.raises(TaskThreadError, match="closed"):
        clerk.submit(lambda: 7).result(20)


@pytest.mark.parametrize("busy", [True, False])
def test_who_waits_for_a_clerk_that_dies_is_told(busy: bool) -> None:
    clerk, holds, go_on = TaskThread("clerk"), threading.Event(), threading.Event()
    assert clerk.submit(lambda: 7).result(20) == 7
    first = None
    if busy:
        first = clerk.submit(lambda: (holds.set(), go_on.wait(20)))
        assert holds.wait(20)
    kill(clerk._thread)
    waiting = clerk.submit(lambda: 7)
    go_on.set()
    for future in filter(None, (first, waiting)):
        with pytest.raises(TaskThreadError, match="'clerk' has died"):
            future.result(20)
    assert clerk.submit(lambda: 8).result(20) == 8
    clerk.close()


def test_a_tokenizer_that_dies_ends_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        monkeypatch.setattr(server.api, "_encode", lambda asked: sys.exit("panic"))
        message = check_error(server.post(prompt="import"), 500)["message"]
        assert message == "the server failed: the thread 'mlx-kv tokenizer' has died"
        monkeypatch.undo()
        assert server.complete("import", 3)
        server.wait_until_empty()


@pytest.mark.parametrize("trouble", ["dies", "hangs"])
def test_a_disk_that_never_answers_costs_only_time(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_kv.server.tiered_prefixes.PATIENCE", 0.3 if trouble == "hangs" else 1000.0)
    stores: list[Troubled] = []

    def open_store(models: Any) -> Troubled:
        stores.append(Troubled(tmp_path, "slow"))
        stores[-1].refresh()
        return stores[-1]

    with running(open_store=open_store) as server:
        wanted = server.complete(LONG + ENDS[0], 20)
        server.wait_until_empty()
    with running(open_store=open_store) as server, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.post, prompt=LONG + ENDS[0], max_tokens=20)
        server.wait_until(lambda: bool(server.worker._active) and server.worker._prefill._fetching is not None)
        if trouble == "dies":
            kill(server.worker._prefixes._disk._thread)
            stores[-1].go_on.set()
        answer = slow.result(20).json()
        assert answer["choices"][0]["text"] == wanted
        assert cached(answer) == 0
        stores[-1].go_on.set()
        again = server.post(prompt=LONG + ENDS[1], max_tokens=5).json()  # and the disk is asked again
        server.wait_until(lambda: not server.worker._prefixes._late)
        again = server.post(prompt=LONG + ENDS[2], max_tokens=5).json()
        assert cached(again) > 1000


# --- clients that take nothing ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def deaf(url: str, max_tokens: int = 1_000_000) -> Iterator[socket.socket]:
    """A client that asks for a long stream, and takes nothing of it."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    raw.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    body = json.dumps({"prompt": "import os", "max_tokens": max_tokens, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    with raw:
        yield raw


def test_a_client_that_takes_nothing_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """With events so large that no buffer takes many of them."""
    monkeypatch.setattr("mlx_kv.server.responses.STALLED", 0.2)
    monkeypatch.setattr("mlx_kv.server.responses.event", lambda data: b": " + b"x" * 500_000 + b"\n\n")
    with running(max_batch_size=1, limits=Limits(queue=0)) as server, deaf(server.url):
        server.wait_until(lambda: server.api.admission.admitted == 1)
        server.wait_until_empty()
        assert server.complete("import", 3)


# --- signals ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def streaming(url: str, max_tokens: int) -> Iterator[Iterator[str]]:
    """The lines that still come of a streamed answer, after the first."""
    body = {"prompt": "import", "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield filter(None, lines)


def interrupted(process: subprocess.Popen[str]) -> str:
    """What is said after Ctrl-C."""
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    return process.stderr.readline()


def test_ctrl_c_lets_requests_finish() -> None:
    with command() as (process, url):
        with streaming(url, 300) as lines:
            said = interrupted(process)
            rest = list(lines)
        assert said == (
            "mlx-kv: stopping: 1 request to be finished within 30 s; another Ctrl-C (SIGINT) ends at once\n"
        )
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason": "length"' in rest[-2]
        assert process.wait(20) == 130
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_a_signal_ends_at_once(first: signal.Signals) -> None:
    """Every stream ends with an error and properly, also beside a client that takes nothing; two lines are said."""
    with command("--drain-seconds", "1000") as (process, url):
        assert process.stderr is not None
        with streaming(url, 100_000) as lines, streaming(url, 100_000) as more, deaf(url):
            waited = time.monotonic() + 20
            while httpx.get(f"{url}/memory").json()["in_flight"] < 3:
                assert time.monotonic() < waited
            process.send_signal(first)
            assert process.stderr.readline().startswith("mlx-kv: stopping: 3 requests to be finished within 1000 s;")
            process.send_signal(signal.SIGTERM)  # which changes nothing
            next(lines)
            assert interrupted(process) == "mlx-kv: stopping at once: 3 requests to be ended with an error\n"
            for rest in (list(lines), list(more)):
                assert "the server is shutting down" in rest[-2]
                assert rest[-1] == "data: [DONE]"
            assert process.wait(20) == 130
        assert process.stderr.read() == ""


LOADS = SERVE + (
    "from mlx_kv.mlxlm import convert; import time; "
    "convert.load = lambda path: print('loading', file=sys.stderr, flush=True) or time.sleep(60); main()"
)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_while_the_model_loads_is_one_line(number: signal.Signals, code: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", LOADS], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "loading\n"
        process.send_signal(number)
        assert process.wait(20) == code
        assert process.stderr.read() == "mlx-kv: stopped\n"
    finally:
        process.kill()
        process.communicate()


def test_a_terminal_that_is_gone_keeps_no_signal_from_what_it_asks_for() -> None:
    def gone(line: str) -> None:
        raise BrokenPipeError

    hurried: list[bool] = []
    server: Any = SimpleNamespace(
        api=SimpleNamespace(desk=SimpleNamespace(admitted=1)), should_exit=False, hurry=lambda: hurried.append(True)
    )
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ending = ShutdownSignals(gone, 1.0)
        ending.attach(server)
        signal.raise_signal(signal.SIGTERM)
        assert server.should_exit
        signal.raise_signal(signal.SIGINT)
        assert hurried == [True]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
