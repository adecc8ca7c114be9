"""What the leader alone meets, and what another rank alone does: all hear of it, over real sockets in this process."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from test_link import everywhere, linked
from tiny_models import make_model

from mlx_kv.generation.agreement import Alone
from mlx_kv.generation.engine import make_engine
from mlx_kv.ranks import following
from mlx_kv.ranks.following import follow
from mlx_kv.ranks.group import RankGroup
from mlx_kv.ranks.link import RanksError


def raises() -> None:
    raise RuntimeError("the drafter is out of memory")


@pytest.mark.parametrize(
    ("say", "line"), [(raises, "the drafter is out of memory"), (lambda: {1, 2}, "set is not JSON serializable")]
)
def test_whatever_the_leader_alone_meets_all_hear_of(say: Any, line: str) -> None:
    """And they go on: the next thing that is told is heard."""

    def asked(group: RankGroup) -> list[Any]:
        with pytest.raises((RuntimeError, TypeError, ValueError), match=line):
            group.agreement.told(say)
        return [group.agreement.told(lambda: [5, "six"])]

    with linked(3) as groups:
        assert everywhere(groups, asked) == [[[5, "six"]]] * 3


def test_whether_caches_are_returned_the_leader_says() -> None:
    class Led(Alone):
        """Another rank, whose leader keeps prompts and drafts nothing."""

        def told(self, say: Any) -> Any:
            own = say()
            return [False, True] if own == (False, False) else own

    engine = make_engine(make_model("llama"), set(), return_caches=False, agreement=Led())
    assert engine._return_caches  # type: ignore[attr-defined]


def test_a_rank_that_fails_alone_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader waits for it in a collective, and says nothing; a leader that says something has failed, too."""
    monkeypatch.setattr(following, "FAILED_ALONE_SECONDS", 0.2)

    class Fails:
        rows, pending = list[int](), list[int]()

        def step(self) -> Any:
            raise MemoryError("no memory for a step")

    def followed(group: RankGroup) -> str:
        with pytest.raises(RanksError) as caught:
            follow(lambda agreement: Fails(), group)  # type: ignore[arg-type,return-value]
        return str(caught.value)

    for silent in (False, True):
        with ThreadPoolExecutor(1) as pool, linked() as (first, other):
            heard = pool.submit(followed, other)
            for number in range(1 if silent else 3):
                first.leader.tell("engine")
                first.leader.tell("step", following.standing(Fails(), 0))  # type: ignore[arg-type]
                if not silent:
                    time.sleep(0.05)
                    assert first.gone_within(0.0) is None, number
            reason = first.gone_within(10.0)
            assert reason is not None
            assert "rank 1 alone cannot go on: a step failed with MemoryError: no memory for a step" in reason
            assert "no memory for a step" in heard.result(10)
