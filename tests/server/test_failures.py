"""How requests end when something of the server ends: its worker, its other threads; or takes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import ENDS, LONG, SERVE, Running, Troubled, cached, check_error, command, deaf, running

from mlx_kv.server.api import Limits
from mlx_kv.server.dialects.completions import CompletionWriter


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
    monkeypatch.setattr("mlx_kv.server.rows.ENGINE_PAUSE", 0.0)
    monkeypatch.setattr("mlx_kv.server.rows.make_engine", broken)
    monkeypatch.setattr(server.rows.engine, "step", broken)


def no_delivery(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be told to clients any longer, not even that."""
    monkeypatch.setattr(server.worker, "deliver", broken)


def a_step_that_exits(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.rows.engine, "step", sys.exit)


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
        server.wait_until(lambda: bool(server.worker.monitor.snapshot.decoding))
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
        server.worker.cancel(server.worker.monitor.snapshot)  # type: ignore[arg-type]  # which wakes it
        server.wait_until(lambda: server.api.admission.closing is not None)

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
    from mlx_kv.server import rows

    tries, real = [], rows.make_engine

    def second(*arguments: Any, **options: Any) -> Any:
        tries.append(1)
        return broken() if len(tries) == 1 else real(*arguments, **options)

    monkeypatch.setattr(rows, "ENGINE_PAUSE", 0.0)
    with running() as server:
        monkeypatch.setattr(rows, "make_engine", second)
        monkeypatch.setattr(server.rows.engine, "step", broken)
        assert "see its log" in check_error(server.post(prompt="import"), 500)["message"]
        assert server.complete("import", 3)
        assert len(tries) == 2


DIES = SERVE + ("from mlx_kv.server import rows; rows.Rows._deliver = lambda self, tokens: sys.exit('gone'); main()")


@pytest.mark.slow
def test_the_command_ends_with_its_worker() -> None:
    with command(program=["-c", DIES]) as (process, url):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "import"}, timeout=60)
        assert "its worker died of SystemExit: gone" in check_error(answer, 503)["message"]
        assert process.wait(20) == 1
        assert process.stderr is not None
        *log, line = process.stderr.read().splitlines()
        assert line == "mlx-kv: error: the server has ended: its worker died of SystemExit: gone"
        assert log[0].endswith(" ERROR the worker has died")  # and where


# --- its other threads ------------------------------------------------------------------------------------------------


def test_a_tokenizer_that_dies_ends_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        reader = server.api._handler._readers[server.worker.default]
        monkeypatch.setattr(reader, "encode", lambda asked: sys.exit("panic"))
        message = check_error(server.post(prompt="import"), 500)["message"]
        assert message == "the server failed: the tokenizer ended with SystemExit: panic"
        monkeypatch.undo()
        assert server.complete("import", 3)
        server.wait_until_empty()


STUCK = SERVE + (
    "import time; from mlx_kv.server import output as grammars; "
    "grammars.COMPILE_SECONDS = 0.2; grammars.GrammarCompiler._compile = lambda *arguments: time.sleep(1000); main()"
)


@pytest.mark.slow
def test_the_command_ends_while_a_grammar_is_compiled_for_good() -> None:
    """Python waits for threads of executors at its exit, for as long as they run."""
    with command(program=["-c", STUCK]) as (process, url):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "import", "regex": "a+"}, timeout=60)
        assert "to compile" in check_error(answer, 400)["message"]
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.slow
def test_a_disk_thread_that_dies_costs_only_time(tmp_path: Path) -> None:
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
        server.wait_until(lambda: bool(server.rows.active) and server.rows.prefixes._load is not None)
        assert stores[-1].asked.wait(20)  # else it might die with a lock in its hand, as no thread does by itself
        kill(next(iter(server.rows.prefixes._disk._threads)))
        stores[-1].go_on.set()
        answer = slow.result(20).json()
        assert answer["choices"][0]["text"] == wanted
        assert cached(answer) == 0
        again = server.post(prompt=LONG + ENDS[2], max_tokens=5).json()
        assert cached(again) > 1000


# --- clients that take nothing ----------------------------------------------------------------------------------------


def test_a_client_that_takes_nothing_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """With events so large that no buffer takes many of them."""
    monkeypatch.setattr("mlx_kv.server.handler.STALLED", 0.2)
    monkeypatch.setattr("mlx_kv.server.dialects.completions.event", lambda data: b": " + b"x" * 500_000 + b"\n\n")
    with running(max_batch_size=1, limits=Limits(queue=0)) as server, deaf(server.url):
        server.wait_until(lambda: server.api.admission.admitted == 1)
        server.wait_until_empty()
        assert server.complete("import", 3)


def test_nor_does_one_hold_it_that_takes_no_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two is written at once, whoever takes it; then the connection has no room for another."""
    monkeypatch.setattr("mlx_kv.server.handler.STALLED", 0.2)
    whole = CompletionWriter.whole
    monkeypatch.setattr(
        CompletionWriter, "whole", lambda self, choices: whole(self, choices) | {"more": "x" * 20_000_000}
    )
    with running(max_batch_size=1, limits=Limits(queue=1)) as server:
        with deaf(server.url, 2, max_tokens=3, stream=False):
            server.wait_until(lambda: answered(server, 200) == answered(server, 499) == 1)
            server.wait_until_empty()
        assert server.complete("import", 3)


def answered(server: Running, status: int) -> float:
    """How many completions have ended with a status."""
    return float(server.metrics.requests.labels("completions", str(status))._value.get())
