"""How a server ends, without a model: what is heard while answers end."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_kv.server import run


@pytest.fixture(autouse=True)
def _told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FLUSH_SECONDS", 0.0)


def ending(drain_seconds: float, then: Any) -> tuple[list[str], float]:
    """What clients are told, and after how long, where something happens while answers end."""
    told: list[str] = []
    admission = SimpleNamespace(give_up=lambda why="the server is shutting down": told.append(why))
    worker = SimpleNamespace(alive=True, failure=None)
    api: Any = SimpleNamespace(app=None, admission=admission, worker=worker)
    server = run.Server(api, drain_seconds)
    server.should_exit = True
    timer = threading.Timer(0.1, then, [server])
    timer.start()
    began = time.monotonic()
    asyncio.run(server._end_responses())
    timer.join()
    return told, time.monotonic() - began


def test_a_rank_that_is_gone_while_answers_end_ends_them() -> None:
    told, seconds = ending(20, lambda server: server.end("rank 1 is gone"))
    assert told == ["the server ends: rank 1 is gone"]
    assert seconds < 10


def test_a_worker_that_ends_while_answers_end_ends_them() -> None:
    told, seconds = ending(20, lambda server: setattr(server.api.worker, "alive", False))
    assert told == ["the server ends: its worker has ended"]
    assert seconds < 10


def test_a_second_ctrl_c_ends_answers_at_once() -> None:
    told, seconds = ending(20, lambda server: server.hurry())
    assert told == ["the server is shutting down"]
    assert seconds < 10


def test_answers_have_as_long_as_was_said() -> None:
    told, seconds = ending(0.4, lambda server: None)
    assert told == ["the server is shutting down"]
    assert seconds >= 0.4


class LeftError(Exception):
    """Instead of the end of the process."""


def test_other_ranks_hear_that_a_signal_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, str]] = []

    def left(code: int) -> None:
        raise LeftError(code)

    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(run, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr(run.os, "_exit", left)
    for part in (lambda code, why: heard.append((code, why)), lambda code, why: time.sleep(5)):
        signals = run.ShutdownSignals(lambda line: None, 1.0, part)
        with pytest.raises(LeftError):
            signals._handle(signal.SIGTERM, None)
    assert heard == [(0, "stopped")]
