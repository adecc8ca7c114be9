"""SIGTERM to a rank that follows, without MLX: a process that waits, as in a collective, where Python hears nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

WAITS = """
import ctypes, os, sys, time
from types import SimpleNamespace
from mlx_kv.ranks.signals import leave_signals_to_leader
leave_signals_to_leader(SimpleNamespace(rank=1, fail=lambda reason: time.sleep(600)))  # the leader reads nothing
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
