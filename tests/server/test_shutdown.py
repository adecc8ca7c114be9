"""How a server ends, without a model: what is heard while answers end."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_kv.server import run


@pytest.fixture(autouse=True)
def _told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TOLD_WITHIN", 0.0)


def ending(drain_seconds: float, then: Any) -> tuple[list[str], float]:
    """What clients are told, and after how long, where something happens while answers end."""
    told: list[str] = []
    admission = SimpleNamespace(give_up=lambda why="the server is shutting down": told.append(why))
    api: Any = SimpleNamespace(app=None, admission=admission)
    server = run.Server(api, drain_seconds)
    timer = threading.Timer(0.1, then, [server])
    timer.start()
    began = time.monotonic()
    asyncio.run(server._end_answers())
    timer.join()
    return told, time.monotonic() - began


def test_a_rank_that_is_gone_while_answers_end_ends_them() -> None:
    told, seconds = ending(20, lambda server: server.end("rank 1 is gone"))
    assert told == ["the server ends: rank 1 is gone"]
    assert seconds < 10


def test_answers_have_as_long_as_was_said() -> None:
    told, seconds = ending(0.4, lambda server: None)
    assert told == ["the server is shutting down"]
    assert seconds >= 0.4
