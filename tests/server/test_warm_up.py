"""A GPU is warm before the server is ready: what is run, and that nothing of it is left."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from engines import Shapes, as_on_a_gpu, make_engine
from serving import PLENTY
from tiny_models import VOCAB, make_model

from mlx_kv import CachePolicy
from mlx_kv.bundled import model_path
from mlx_kv.cli.serve import _show_warm_up
from mlx_kv.generation import warm_up as warm_up_module
from mlx_kv.generation.engine import Engine
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.generation.warm_up import padded_shapes, warm_up
from mlx_kv.mlxlm.attention import AttentionPatch
from mlx_kv.mlxlm.loading import load
from mlx_kv.server.rows import Models, WorkerSettings
from mlx_kv.server.served import Served
from mlx_kv.server.worker import Worker

LENGTHS = [64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048]


@lru_cache
def models() -> Models:
    return Models(*load(model_path("reference")))


def started(**settings: Any) -> Worker:
    chosen = WorkerSettings(prefill_step_size=256, prompt_memory_bytes=PLENTY, **settings)
    worker = Worker([Served("llama", models, chosen)])
    worker.start()
    return worker


def test_shapes_are_those_of_padded_prompts() -> None:
    with as_on_a_gpu():
        assert padded_shapes(1, 2048) == [(1, tokens) for tokens in LENGTHS]
        assert padded_shapes(6, 300) == [(rows, tokens) for rows in (1, 2, 4) for tokens in LENGTHS[:4]]
        assert padded_shapes(64, 64) == [(1, 64), (2, 64), (4, 64), (8, 64)]


@pytest.mark.parametrize("policy", [CachePolicy(), CachePolicy(bits=8, group_size=32)], ids=["plain", "8 bits"])
def test_every_shape_is_read_once(policy: CachePolicy) -> None:
    model, shapes, done = make_model("llama"), Shapes(), list[tuple[int, int]]()
    with AttentionPatch(model, default_hook=shapes), as_on_a_gpu():
        engine, spare = (make_engine(model, set(), policy, 4, 256) for _ in range(2))
        warm_up(engine, spare, VOCAB, lambda rows, tokens: True, lambda *counts: done.append(counts))
    assert {(rows, new) for rows, new, _ in shapes.seen} == {(rows, n) for rows in (1, 2, 4) for n in LENGTHS[:4]}
    assert done == [(number, 12) for number in range(13)]
    assert engine.pass_size is spare.pass_size
    assert not spare.busy
    assert not engine.stalls[1]  # it has done nothing itself


def test_what_does_not_fit_or_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes, done = make_model("llama"), Shapes(), list[int]()
    with AttentionPatch(model, default_hook=shapes), as_on_a_gpu():
        engine, spare, late = (make_engine(model, set(), None, 2, 128) for _ in range(3))
        warm_up(engine, spare, VOCAB, lambda rows, tokens: rows * tokens < 100, lambda number, _: done.append(number))
        assert {(rows, new) for rows, new, _ in shapes.seen} == {(1, 64)}
        monkeypatch.setattr(warm_up_module, "MAX_SECONDS", 0.0)
        shapes.seen.clear()
        warm_up(engine, late, VOCAB, lambda rows, tokens: True, lambda number, _: done.append(number))
    assert not shapes.seen
    assert done == [0, 1, 2, 3, 4] * 2


def test_a_server_is_warm_when_it_is_ready_and_nothing_is_left_of_it() -> None:
    done: list[int] = []
    with as_on_a_gpu():
        worker = started(warm_up=lambda number, _: done.append(number), drafting=DraftSettings(drafter="ngram"))
        engine = worker.default.rows.engine
        assert isinstance(engine, Engine)
        assert done == list(range(1 + 4 * 4))
        assert worker.default.rows.prefixes.memory.nbytes == 0
        assert engine.answers.expect(3) == 3
        assert engine.speculation is not None
        assert engine.speculation.rounds == 0
        assert worker.stop(20)


def test_on_a_cpu_or_without_it_nothing_is_run() -> None:
    done: list[int] = []
    assert started(warm_up=lambda number, _: done.append(number)).stop(20)
    with as_on_a_gpu():
        assert started().stop(20)
    assert done == []


def test_a_warm_up_that_fails_is_left_to_the_first_requests(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr("mlx_kv.server.worker.warm_up", broken)
    with as_on_a_gpu():
        worker = started(warm_up=lambda *counts: None)
        assert worker.failure is None
        assert worker.stop(20)
    assert "the first requests are slower" in caplog.text


def test_it_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show = _show_warm_up()
    for done in range(4):
        show(done, 3)
    assert "note: the warm-up took 0." in capsys.readouterr().err
