"""Ctrl-C: one line and exit code 130, whenever it comes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from effort import THOROUGH

# Each command meets every other delay, and two of them all: a process costs seconds of importing.
SOME, OTHERS = ([step / 20 for step in range(61)],) * 2 if THOROUGH else ([0, 0.1, 0.5, 1.5], [0.02, 0.25, 0.9, 3])
# What comes before the first line of ours, Python says in its own way: until then the signal waits.
START = """
import signal, sys, mlx_kv_command
mlx_kv_command.guard()
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
mlx_kv_command.main()
"""


def start(*arguments: str) -> subprocess.Popen[bytes]:
    def prepare() -> None:  # a shell's background jobs ignore SIGINT, and so would this
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    command = [sys.executable, "-c", START, *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=prepare
    )


def check(process: subprocess.Popen[bytes], serves: bool = False) -> None:
    try:
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert b"Traceback" not in error
    *before, last, end = error.split(b"\n")
    assert end == b"", error
    if not serves:
        assert last == b"mlx-kv: interrupted", error
        return
    # From where it loads a model, a server takes signals itself, and at work says what it still waits for.
    # Before that, click has ended the line that was being written.
    said = [
        line for line in (*before, last) if line and b", memory at " not in line and b"prompts are kept" not in line
    ]
    assert len(said) == 1, error
    assert said[0] in (b"mlx-kv: interrupted", b"mlx-kv: stopped") or said[0].startswith(
        b"mlx-kv: stopping: 0 requests"
    ), error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("delays", "arguments"),
    [
        (SOME, ("info",)),
        (OTHERS, ("generate", "--prompt", "import os", "--max-tokens", "100000")),
        (OTHERS, ("serve", "--port", "0")),
        (SOME, ("batch", "--prompts", "{prompts}", "--output", "{output}")),
    ],
    ids=["info", "generate", "serve", "batch"],
)
def test_one_line_whenever_it_comes(delays: list[float], arguments: tuple[str, ...], tmp_path: Path) -> None:
    """While modules are imported, a model is loaded, and text is generated."""
    (tmp_path / "prompts").write_text('{"prompt": "x", "max_tokens": 100000}\n')
    started = []
    for delay in delays:
        places = {"prompts": str(tmp_path / "prompts"), "output": str(tmp_path / f"output {delay}")}
        process = start(*(each.format(**places) for each in arguments))
        time.sleep(delay)
        ended = process.poll() is not None
        process.send_signal(signal.SIGINT)
        started.append((process, ended))
    try:
        for process, ended in started:
            if ended or (arguments == ("info",) and process.wait(60) in (0, -signal.SIGINT)):
                out, error = process.communicate()  # it was done: nothing is left but Python's own end
                assert b"reference" in out
                assert error == b""
            else:
                check(process, serves=arguments[0] == "serve")
    finally:
        for process, _ in started:
            process.kill()


@pytest.mark.slow
def test_a_long_prompt_can_be_interrupted(tmp_path: Path) -> None:
    prompt = (Path(__file__).parent.parent / "source.txt").read_text() * 100
    (tmp_path / "long").write_text(prompt)
    process = start("cache", "--prompt-file", str(tmp_path / "long"), "--output", str(tmp_path / "out.safetensors"))
    time.sleep(6)
    process.send_signal(signal.SIGINT)
    check(process)
    assert not (tmp_path / "out.safetensors").exists()


def test_a_second_one_ends_at_once() -> None:
    """Whatever the first one waits for."""
    code = START.replace(
        "mlx_kv_command.main()",
        """
import mlx_kv.cli.main, time
def main():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("ending", flush=True)
        time.sleep(60)
mlx_kv.cli.main.main = main
mlx_kv_command.main()
""",
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    for words in (b"begun\n", b"ending\n"):
        assert process.stdout.readline() == words
        process.send_signal(signal.SIGINT)
    check(process)


def test_an_interrupt_that_is_swallowed_or_turned_into_another_error_still_ends_it() -> None:
    for middle in (
        "except KeyboardInterrupt: raise ImportError('numpy._core failed to import')",
        "except KeyboardInterrupt: sys.exit(2)",
        "finally: pass",
    ):
        body = f"""
class Late:
    def __del__(self):
        {"signal.raise_signal(signal.SIGINT)" if "finally" in middle else "pass"}
def main():
    try:
        late = Late(); del late
        signal.raise_signal(signal.SIGINT)
    {middle}
import mlx_kv.cli.main
mlx_kv.cli.main.main = main
mlx_kv_command.main()
"""
        code = START.replace("mlx_kv_command.main()\n", body)
        check(
            subprocess.Popen(
                [sys.executable, "-c", code],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        )
