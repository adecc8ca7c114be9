"""A model that nobody asks anything leaves memory, comes back, and says the same."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from serving import SOURCE, running

from mlx_kv.server.served import IdleTimer

WEIGHTS = 15_000_000  # bytes of the reference model, and some less


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_timer_is_over_once_after_so_long_without_a_request() -> None:
    clock, over = Clock(), list[bool]()
    timer = IdleTimer(10.0, clock)
    assert (timer.update(True), timer.seconds_left()) == (False, None)  # nothing was asked yet
    for _ in range(2):
        assert not timer.update(False)
        assert timer.seconds_left() is None
        clock.now += 100
        assert not timer.update(True)
        assert timer.seconds_left() == 10
        clock.now += 7
        assert not timer.update(True)
        assert timer.seconds_left() == 3
        clock.now += 3
        over.append(timer.update(True))
        assert (timer.update(True), timer.seconds_left()) == (False, None)
    assert over == [True, True]


def test_a_timer_without_seconds_is_never_over() -> None:
    timer = IdleTimer()
    assert not timer.update(False)
    assert not timer.update(True)
    assert timer.seconds_left() is None


def test_weights_that_cannot_be_let_go_stay(caplog: pytest.LogCaptureFixture) -> None:
    with running(idle_seconds=0.1) as server:
        weights = server.worker.default.weights[0]

        def broken(network: Any) -> None:
            raise OSError("the disk is gone")

        weights._release = broken
        wanted = server.complete(SOURCE[:400], 10)
        server.wait_until(lambda: "the weights could not be unloaded" in caplog.text)
        assert server.complete(SOURCE[:400], 10) == wanted
        assert weights.loaded


@pytest.mark.parametrize("draft", [False, True], ids=["plain", "draft model"])
def test_a_server_lets_go_and_goes_on(draft: bool) -> None:
    with running(draft=draft, idle_seconds=1.5, prompt_memory_bytes=2**24) as server:
        wanted = server.complete(SOURCE[:400], 30)
        held = mx.get_active_memory()
        server.wait_until(lambda: mx.get_active_memory() < held - WEIGHTS)
        server.wait_until(lambda: server.worker.monitor.snapshot.active_memory < held - WEIGHTS)
        answer = server.post(prompt=SOURCE[:400], max_tokens=30).json()
        assert answer["choices"][0]["text"] == wanted
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 50  # what was read stays read


def test_no_weights_are_held_before_the_first_request() -> None:
    before = mx.get_active_memory()
    with running(lazy=True) as server:
        assert mx.get_active_memory() < before + 1_000_000
        assert server.worker.monitor.snapshot.active_memory < before + 1_000_000
        with running() as other:
            assert server.complete(SOURCE[:400], 30) == other.complete(SOURCE[:400], 30)
