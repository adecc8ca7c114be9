"""`mlx-kv serve`: signals, options, and how the process ends."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from serving import SERVE, Running, command, deaf

import mlx_kv
from mlx_kv.bundled import model_path
from mlx_kv.cache.eviction.calibration import BitsLoss
from mlx_kv.files.calibration_file import beside
from mlx_kv.server.run import ShutdownSignals


@contextlib.contextmanager
def terminated_while_it_answers(process: subprocess.Popen[str], url: str, max_tokens: int) -> Iterator[Iterator[str]]:
    """The lines that still come of an answer, after the first, when the server has got SIGTERM."""
    body = {"prompt": "import", "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        yield filter(None, lines)


@pytest.mark.slow
def test_sigterm_lets_requests_finish() -> None:
    with command("--kv-bits", "8") as (process, url):
        with terminated_while_it_answers(process, url, 600) as lines:
            time.sleep(0.3)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health")
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason": "length"' in rest[-2]
        assert process.wait(20) == 0
        assert process.stderr is not None
        (line,) = process.stderr.read().splitlines()
        assert line.startswith("mlx-kv: stopping: 1 request to be finished within 30 s;")


LOGS = SERVE + (
    "import logging; from mlx_kv.server import api; "
    "api.StatusRoutes.ready = lambda self, request: logging.warning('made by a library'); main()"
)


@pytest.mark.slow
def test_what_libraries_log_has_our_form() -> None:
    with command(program=["-c", LOGS]) as (process, url):
        httpx.get(f"{url}/ready", timeout=60)
        httpx.post(f"{url}/v1/completions", json={"prompt": "import", "max_tokens": 1, "surprise": 1}, timeout=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr is not None
        lines = [line for line in process.stderr.read().splitlines() if "library" in line or "surprise" in line]
    assert len(lines) == 2
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING ", line) for line in lines)


@pytest.mark.slow
def test_sigterm_waits_only_so_long() -> None:
    with command("--drain-seconds", "0") as (process, url):
        with terminated_while_it_answers(process, url, 4000) as lines:
            rest = list(lines)
        assert "shutting down" in rest[-2]
        assert process.wait(20) == 0


@pytest.mark.slow
def test_bits_are_chosen_before_it_serves(tmp_path: Path) -> None:
    model = shutil.copytree(model_path("draft"), tmp_path / "draft")
    calibration = mlx_kv.calibrate(*mlx_kv.load(str(model)), [[5 + i, 6, 7, 8] * 16 for i in range(6)])
    losses = (BitsLoss(4, 4, 64, "rotated", 700, 0.5, 0.25),)
    mlx_kv.save_calibration(beside(model), replace(calibration, losses=losses))
    for bound, bits in (("0.75", True), ("0.001", False)):
        with command("--model", str(model), "--kv-bits", "auto", "--max-loss", bound, notes=1) as (_, url):
            (engine,) = httpx.get(f"{url}/memory").json()["policies"]
            assert ("bits 4" in engine["policy"]) == bits


def failing(*options: str, **environment: str) -> str:
    words = [sys.executable, "-m", "mlx_kv.cli", "serve", *options]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | environment, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.slow
def test_bad_options_are_one_line(tmp_path: Path, server: Running) -> None:
    empty, odd = tmp_path / "empty", tmp_path / "odd"
    empty.write_text("\n \n")
    odd.write_text("good\nnot good\n")
    assert "has no key in it" in failing("--api-key-file", str(empty))
    assert "key 2 in" in failing("--api-key-file", str(odd))
    assert "bits" in failing("--kv-bits", "7")
    assert "neither a directory nor a hub id" in failing("--model", "/nowhere", "--port", "0")
    assert "cannot listen on 127.0.0.1" in failing("--port", server.url.rsplit(":", 1)[1])
    hidden = tmp_path / "starlette.py"
    hidden.write_text("raise ModuleNotFoundError('hidden', name='starlette')")
    assert 'pip install "mlx-kv[server]"' in failing(PYTHONPATH=str(tmp_path))


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    "from mlx_kv.mlxlm import loading; import time; "
    "loading.load = lambda path, **options: print('loading', file=sys.stderr, flush=True) or time.sleep(60); main()"
)


@pytest.mark.slow
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
    api = SimpleNamespace(admission=SimpleNamespace(admitted=1))
    server: Any = SimpleNamespace(api=api, should_exit=False, hurry=lambda: hurried.append(True))
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
