"""The worker of a leader, with a follower that only listens: what it is told, and when."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from tiny_models import make_model

from mlx_kv import CachePolicy
from mlx_kv.ranks.group import RankGroup
from mlx_kv.ranks.link import Channel, Follower, Leader, RanksError
from mlx_kv.server.output import Job
from mlx_kv.server.rows import Models, WorkerSettings
from mlx_kv.server.served import Served
from mlx_kv.server.worker import Worker


class Alike(RankGroup):
    """Whatever is asked, all others say the same."""

    def gathered(self, value: Any) -> list[Any]:
        return [value, value]


class Listener:
    """A follower that notes what it is told; it has no part of the model."""

    def __init__(self, link: Follower) -> None:
        self.told: list[Any] = []
        self._link = link
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(RanksError):
            while (message := self._link.next()) is not None:
                self.told.append(message)
                if message[0] in ("memory", "whose_parts"):
                    self._link.answer(0)

    def heard(self, kind: str) -> list[Any]:
        return [content for word, *content in list(self.told) if word == kind]


@contextlib.contextmanager
def leading(reference: Any, policy: CachePolicy) -> Iterator[tuple[Worker, RankGroup, Listener]]:
    here, there = socket.socketpair()
    leader, follower = Leader({1: Channel(here)}, lambda reason: None), Follower(Channel(there), lambda reason: None)
    group = Alike(mx.distributed.init(), None, leader, 60.0)
    listener = Listener(follower)
    models = Models(make_model("llama", max_position_embeddings=8192), reference[1])
    worker = Worker([Served("llama", lambda: models, WorkerSettings(policy, prompt_memory_bytes=0))], group)
    try:
        worker.start()
        yield worker, group, listener
    finally:
        worker.stop(20)
        leader.close(1, "over")
        follower.close(1, "over")


def test_followers_get_each_job_and_each_step_and_nothing_but_memory_while_all_are_idle(reference: Any) -> None:
    with leading(reference, CachePolicy(budget=64, keep_recent=8)) as (worker, _, listener):
        job = Job(list(range(40)), 4)
        worker.submit(job)
        deadline = time.monotonic() + 20
        while len(job.answer) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.5)  # two updates of the snapshot
        kinds = [kind for kind, *_ in listener.told if kind not in ("engine", "value")]
    fields = {"index": job.number, "tokens": job.tokens, "max_tokens": 4, "before": [], "private": False}
    fields |= {"resumed": 0, "room": 4}
    assert listener.heard("submit") == [[fields, None, False]]
    assert len(listener.heard("step")) >= 4
    last = max(place for place, kind in enumerate(kinds) if kind == "step")
    assert set(kinds[last + 1 :]) == {"memory", "free"}
    assert listener.heard("free") == [[[1]]]  # the caches of the row that has ended


def test_the_thread_that_ran_the_passes_waits_for_the_last_one(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of MLX are a thread's own: waiting in another one waits for nothing."""
    finished: list[tuple[str, list[Any]]] = []
    with leading(reference, CachePolicy()) as (worker, group, listener):
        monkeypatch.setattr(
            group, "finish", lambda: finished.append((threading.current_thread().name, listener.heard("close")))
        )
        assert worker.stop(20)
    assert finished == [("mlx-kv worker", [])]


@pytest.mark.parametrize("lost", [False, True])
def test_a_worker_that_has_lost_a_rank_leaves_the_limit_of_freed_memory(
    lost: bool, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To change it, MLX waits for collectives that never end, and no other thread of Python goes on meanwhile."""
    ended: list[object] = []
    monkeypatch.setattr("mlx_kv.server.worker.freed_memory.end", ended.append)
    with leading(reference, CachePolicy()) as (worker, group, _):
        if lost:
            group.link.break_up("rank 1 is gone")
            worker.submit(Job([1, 2, 3], 4))
            worker._thread.join(20)
            assert (worker.alive, worker.failure) == (False, "rank 1 is gone")
    assert ended == ([] if lost else [worker])


def test_weights_of_several_machines_stay(reference: Any) -> None:
    """What is read again in their place would be the whole model's."""
    with leading(reference, CachePolicy()) as (worker, _, _):
        assert "several machines" in str(worker.call(lambda: worker.unload(worker.default)).result(20))
        worker.keep_alive(worker.default, 0.0)
        assert worker.default.idle.seconds is None
