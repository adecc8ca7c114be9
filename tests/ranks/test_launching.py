"""Ranks find each other, and none outlives its test."""

from __future__ import annotations

import subprocess
import sys
import time

import programs
import pytest
from launching import HERE, run_ranks, started_ranks, succeeded


@pytest.mark.slow
def test_ranks_find_each_other() -> None:
    found = succeeded(run_ranks(2, programs.total, "sum"))
    assert [each.stdout for each in found] == ["sum 0 2 3\n", "sum 1 2 3\n"]


def test_what_hangs_is_killed_and_what_it_said_is_told() -> None:
    sleeps = ("-c", "import sys, time; print('here', sys.argv[1:], file=sys.stderr); time.sleep(600)")
    with started_ranks(2, sleeps, "word", each=lambda rank: [f"rank {rank}"]) as ranks:
        assert ranks.wait_for("here", 1) == "here ['word', 'rank 1']"
        with pytest.raises(AssertionError, match=r"ranks still run after 0.1 s:\n--- rank 0, at work"):
            ranks.wait(0.1)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert all(process.returncode == -9 for process in ranks.processes)


def test_the_ranks_end_with_the_process_that_started_them() -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux tells a process that its parent is gone")
    code = (
        "import os, sys, time; sys.path.insert(0, sys.argv[1]); from launching import started_ranks\n"
        "with started_ranks(1, ('-c', 'import time; time.sleep(600)')) as ranks:\n"
        "    print(ranks.processes[0].pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(HERE)], stdout=subprocess.PIPE, text=True, check=False)
    pid, deadline = int(done.stdout), time.monotonic() + 5
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
