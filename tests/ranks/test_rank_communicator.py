"""What the leader alone meets, and what another rank alone does: all hear of it, over real sockets in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engines import make_engine
from test_link import everywhere, linked
from tiny_models import make_model

from mlx_kv.communicator import LocalCommunicator
from mlx_kv.ranks import engine as rank_engine
from mlx_kv.ranks.engine import follow
from mlx_kv.ranks.group import RankGroup
from mlx_kv.ranks.link import RanksError


def raises() -> None:
    raise RuntimeError("the drafter is out of memory")


@pytest.mark.parametrize(
    ("say", "line"), [(raises, "the drafter is out of memory"), (lambda: {1, 2}, "set is not JSON serializable")]
)
def test_whatever_the_leader_alone_meets_all_hear_of(say: Any, line: str) -> None:
    """And they go on: the next message arrives."""

    def asked(group: RankGroup) -> list[Any]:
        with pytest.raises((RuntimeError, TypeError, ValueError), match=line):
            group.broadcast(say)
        return [group.broadcast(lambda: [5, "six"])]

    with linked(3) as groups:
        assert everywhere(groups, asked) == [[[5, "six"]]] * 3


def test_whether_caches_are_returned_the_leader_says() -> None:
    class Led(LocalCommunicator):
        """Another rank, whose leader keeps prompts and drafts nothing."""

        def broadcast(self, make: Any) -> Any:
            own = make()
            return [False, True] if own == (False, False) else own

    engine = make_engine(make_model("llama"), set(), return_caches=False, communicator=Led())
    assert engine._return_caches  # type: ignore[attr-defined]


def test_a_rank_that_fails_alone_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader waits for it in a collective, and says nothing; a leader that says something has failed, too."""
    monkeypatch.setattr(rank_engine, "FAILED_ALONE_SECONDS", 0.2)

    class Fails:
        rows, pending = list[int](), list[int]()

        def step(self) -> Any:
            raise MemoryError("no memory for a step")

    def followed(group: RankGroup) -> str:
        with pytest.raises(RanksError) as caught:
            follow(lambda communicator: Fails(), group)  # type: ignore[arg-type,return-value]
        return str(caught.value)

    for silent in (False, True):
        with ThreadPoolExecutor(1) as pool, linked() as (first, other):
            heard = pool.submit(followed, other)
            for number in range(1 if silent else 3):
                first.leader.tell("engine")
                first.leader.tell("step", rank_engine.state_checksum(Fails(), 0, 0))  # type: ignore[arg-type]
                if not silent:
                    time.sleep(0.05)
                    assert first.gone_within(0.0) is None, number
            reason = first.gone_within(10.0)
            assert reason is not None
            assert "rank 1 alone cannot go on: a step failed with MemoryError: no memory for a step" in reason
            assert "no memory for a step" in heard.result(10)


# --- steps ------------------------------------------------------------------------------------------------------------


class Recorded(RankGroup):
    """The leader, which records the messages of its steps, or a rank that follows them."""

    def __init__(self, messages: list[Any], leads: bool) -> None:
        self.messages, self.rank = messages, 0 if leads else 1

    def gathered(self, value: Any) -> list[Any]:
        return [value]

    def watch(self, step: str = "a step") -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _begins(self, seen: int) -> bool:
        if self.leads:
            self.messages.append(seen)
            return True
        message = self.messages.pop(0)
        assert message in ("end", seen)
        return bool(message != "end")

    def _end(self) -> None:
        self.messages.append("end")


def rounds(count: int, closed: list[bool]) -> Iterator[int]:
    try:
        yield from range(count)
    finally:
        closed.append(True)


def counted(steps: Iterable[int], done: list[int]) -> Any:
    for each in steps:
        done.append(each)
        yield each


@pytest.mark.parametrize(("leaders", "others"), [(9, 9), (3, 9), (3, 1), (9, 1), (1, 1), (5, 5)])
def test_all_ranks_take_as_many_steps_as_the_leader(leaders: int, others: int) -> None:
    messages: list[Any] = []
    taken, closed = [], list[bool]()
    for leads, wanted in ((True, leaders), (False, others)):
        done: list[int] = []
        steps = Recorded(messages, leads).sync_steps(counted(rounds(5, closed), done), lambda step: step)
        for number, _ in enumerate(steps, 1):
            if number == wanted:
                break
        steps.close()
        taken.append(done)
    assert messages == []
    assert taken[0] == taken[1] == list(range(min(5, leaders)))
    assert closed == [True, True]


def test_a_rank_with_other_tokens_is_detected() -> None:
    messages: list[Any] = []
    list(Recorded(messages, True).sync_steps(counted((1, 2, 3), []), lambda step: step))
    with pytest.raises(AssertionError):
        list(Recorded(messages, False).sync_steps(counted((1, 5, 3), []), lambda step: step))
