"""A model that nobody asks anything leaves memory, comes back, and says the same."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from serving import SOURCE, running

from mlx_kv.bundled import draft_path
from mlx_kv.cli.model import DraftOptions, ModelOptions
from mlx_kv.server.rows import Models
from mlx_kv.server.worker import IdleUnload

WEIGHTS = 15_000_000  # bytes of the reference model, and some less


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_weights_are_let_go_once_after_so_long_without_a_request() -> None:
    clock, gone, models = Clock(), list[Any](), Models(None, None)  # type: ignore[arg-type]
    unload = IdleUnload(10.0, gone.append, clock=clock)
    assert (unload.update(True, models), unload.seconds_left()) == (False, None)  # nothing was asked yet
    for _ in range(2):
        assert not unload.update(False, models)
        assert unload.seconds_left() is None
        clock.now += 100
        assert not unload.update(True, models)
        assert unload.seconds_left() == 10
        clock.now += 7
        assert not unload.update(True, models)
        assert unload.seconds_left() == 3
        clock.now += 3
        assert unload.update(True, models)
        assert (unload.update(True, models), unload.seconds_left()) == (False, None)
    assert gone == [models, models]


def test_weights_that_cannot_be_let_go_stay(caplog: pytest.LogCaptureFixture) -> None:
    def broken(models: Models) -> None:
        raise OSError("the disk is gone")

    clock, models = Clock(), Models(None, None)  # type: ignore[arg-type]
    unload = IdleUnload(1.0, broken, clock=clock)
    unload.update(False, models)
    unload.update(True, models)
    clock.now = 5
    assert not unload.update(True, models)
    assert "the weights could not be unloaded" in caplog.text


def test_nobody_who_does_not_ask_for_it_is_woken() -> None:
    unload = IdleUnload()
    unload.update(False, Models(None, None))  # type: ignore[arg-type]
    assert not unload.update(True, Models(None, None))  # type: ignore[arg-type]
    assert unload.seconds_left() is None


@pytest.mark.parametrize("draft", [False, True], ids=["plain", "draft model"])
def test_a_server_lets_go_and_goes_on(draft: bool) -> None:
    options, drafts = ModelOptions(), DraftOptions(draft_model="reference" if draft else None)

    def unload(models: Models) -> None:
        options.release(models.model)
        drafts.release(models.draft)

    assert draft_path("reference").endswith("draft")
    with running(draft=draft, unload=IdleUnload(0.3, unload), prompt_memory_bytes=2**24) as server:
        wanted = server.complete(SOURCE[:400], 30)
        held = mx.get_active_memory()
        server.wait_until(lambda: mx.get_active_memory() < held - WEIGHTS)
        server.wait_until(lambda: server.worker.monitor.snapshot.active_memory < held - WEIGHTS)
        answer = server.post(prompt=SOURCE[:400], max_tokens=30).json()
        assert answer["choices"][0]["text"] == wanted
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 50  # what was read stays read


def test_no_weights_are_held_before_the_first_request() -> None:
    before, options = mx.get_active_memory(), ModelOptions(lazy_load=True)
    unload = IdleUnload(None, lambda models: options.release(models.model), lazy=True)
    with running(unload=unload) as server:
        assert mx.get_active_memory() < before + 1_000_000
        assert server.worker.monitor.snapshot.active_memory < before + 1_000_000
        with running() as other:
            assert server.complete(SOURCE[:400], 30) == other.complete(SOURCE[:400], 30)
