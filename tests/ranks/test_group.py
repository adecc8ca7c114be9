"""Ranks join if they were started alike, hear of each other's end, and leave with one line."""

from __future__ import annotations

import importlib.metadata
import signal
import time

import programs
import pytest
from launching import run_ranks, started_ranks, succeeded

from mlx_kv import join_ranks
from mlx_kv.ranks.link import EXIT_CODE

SOON = 1.5  # seconds until everybody has left, on a machine that does other things too


def test_alone_there_is_no_group() -> None:
    assert join_ranks() is None


@pytest.mark.slow
def test_messages_arrive_in_the_order_in_which_they_were_told() -> None:
    leader, *others = succeeded(run_ranks(3, programs.talk))
    assert leader.stdout == "frames 3\nover\n"  # what all compared, what they gathered, and the message
    assert {each.stdout for each in others} == {"over\n"}


@pytest.mark.slow
def test_a_script_may_end_without_a_word() -> None:
    assert {each.stdout for each in succeeded(run_ranks(2, programs.leaves))} == {"done\n"}


# --- started otherwise --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_that_differ_say_the_same_line() -> None:
    here = importlib.metadata.version("mlx-kv")
    line = f"rank 1 has another version of mlx-kv than rank 0 (0.0.9, not {here}): start all ranks alike"
    for each in run_ranks(2, programs.otherwise, "version"):
        assert (each.code, each.stderr) == (2, f"refused: {line}\n")


@pytest.mark.slow
def test_a_rank_with_another_secret_does_not_come_in() -> None:
    leader, other = run_ranks(2, programs.otherwise, "secret")
    line = "refused: rank 1 has another secret than the leader: start all ranks alike\n"
    assert (leader.code, other.code) == (2, 2)
    assert leader.stderr == other.stderr == line


@pytest.mark.slow
def test_other_machines_need_a_secret() -> None:
    for each in run_ranks(2, programs.nowhere, "0.0.0.0"):
        assert each.code == 2
        line = (
            "the leader listens on 0.0.0.0, where others could connect: give all ranks the same secret (--secret-file)"
        )
        assert each.stderr == f"refused: {line}\n"


@pytest.mark.slow
def test_a_rank_that_never_comes_is_not_waited_for() -> None:
    leader, _ = run_ranks(2, programs.late, timeout=20)
    assert leader.code != 0
    assert leader.stderr == "mlx-kv: error: not all ranks have come within 1 s: start all ranks again\n"


# --- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "dies"), [("idle", 0), ("busy", 1), ("behind", 1)])
@pytest.mark.slow
def test_all_leave_when_a_rank_dies(how: str, dies: int) -> None:
    with started_ranks(3, programs.idle, how) as ranks:
        for rank in range(3):
            ranks.wait_for("ready", rank)
        time.sleep(0.1)
        began = time.monotonic()
        ranks.kill(dies)
        finished = ranks.wait(20)
        assert time.monotonic() - began < SOON
    who = "the leader" if dies == 0 else f"rank {dies}"
    for rank, each in enumerate(finished):
        if rank == dies:
            assert each.code == -signal.SIGKILL
        else:
            assert each.code == EXIT_CODE, each
            assert each.ours == [f"mlx-kv: error: {who} is gone: start all ranks again"]


@pytest.mark.slow
def test_who_wants_to_know_is_called_first() -> None:
    with started_ranks(2, programs.called) as ranks:
        ranks.wait_for("ready", 0)
        ranks.wait_for("ready", 1)
        ranks.kill(1)
        leader, _ = ranks.wait(20)
    reason = "rank 1 is gone: start all ranks again"
    assert leader.ours == [f"heard {reason}", f"called {[reason]}", "mlx-kv: error: bye"]
    assert leader.code == EXIT_CODE


@pytest.mark.slow
def test_a_step_that_never_ends_ends_the_group() -> None:
    for each in run_ranks(2, programs.hangs, timeout=20):
        assert each.code == EXIT_CODE
        (line,) = each.ours
        assert line.startswith("mlx-kv: error: a step has taken 1 s: a rank, or the network between them, hangs")


@pytest.mark.parametrize(("where", "how", "code"), [(1, "RuntimeError", 1), (0, "ValueError", 2)])
@pytest.mark.slow
def test_what_ends_one_rank_ends_all_with_its_reason(where: int, how: str, code: int) -> None:
    finished = run_ranks(3, programs.fails, where, how)
    assert [each.code for rank, each in enumerate(finished) if rank != where] == [code] * 2
    who = "the leader" if where == 0 else f"rank {where}"
    for rank, each in enumerate(finished):
        if rank != where:
            assert each.ours == [f"mlx-kv: error: {who} has ended: no such model"]
