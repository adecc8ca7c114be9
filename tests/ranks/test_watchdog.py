"""Ranks that hang: steps that take too long, and SIGTERM for a process that waits, as in a collective, without MLX."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from mlx_kv.ranks.link import Watchdog

WAITS = """
import ctypes, os, sys, time
from mlx_kv.ranks.link import leave_signals_to_leader
leave_signals_to_leader(1, lambda reason: time.sleep(600))  # the leader reads nothing
print("waits", flush=True)
reading, writing = os.pipe()
ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1)
print("woken", flush=True)
"""


def test_a_second_sigterm_ends_a_rank_whose_leader_does_not() -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WAITS], text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "waits\n"
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):  # of a launcher, at once
                process.send_signal(number)
            time.sleep(1.3)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    line = "mlx-kv: error: rank 1: stopped by a second SIGTERM, while the leader has not ended\n"
    assert (process.returncode, out, err) == (70, "", line)


def test_a_step_may_take_as_long_as_those_before_it_and_more() -> None:
    late: list[str] = []
    watchdog = Watchdog(late.append, 0.2)
    with watchdog.watch("step"), watchdog.watch("inner"):
        time.sleep(0.05)
    assert watchdog.limit("step") > 0.9  # twenty times as long
    assert watchdog.limit("inner") == 0.2  # it was part of the other
    with watchdog.watch("step"):
        time.sleep(0.3)
    with watchdog.watch("prompt"):
        for _ in range(3):  # chunks
            time.sleep(0.12)
            watchdog.progress()
    watchdog.progress()  # of nothing
    assert late == []
    with watchdog.watch("other"):
        time.sleep(0.6)
    assert len(late) == 1
    assert late[0].startswith("other has taken 0 s")
