"""What several ranks keep of prompts, each its part, is found as by one process; all drop what the leader drops."""

from __future__ import annotations

import json

import pytest
from launching import run_ranks, succeeded
from prompts import PLENTY, alone, ranked


@pytest.mark.parametrize(
    ("family", "split", "policy"),
    [("qwen2", "heads", "plain"), ("ministral3", "layers", "plain"), ("qwen2", "layers", "budget")],
)
def test_what_is_found_is_what_one_process_finds(family: str, split: str, policy: str) -> None:
    expected = alone(family, policy, PLENTY)
    leader, other = map(
        json.loads,
        (each.stdout for each in succeeded(run_ranks(2, ranked, family, split, policy, PLENTY, timeout=240))),
    )
    assert leader["told"] == expected["told"]
    assert sum(cached for cached, _ in expected["told"]) > 300
    assert (leader["entries"], other["parts"], other["entries"]) == (expected["entries"],) * 3


def test_all_ranks_drop_what_the_leader_drops() -> None:
    family, policy = "qwen2", "8 bits"
    expected, plenty = alone(family, policy, 0), alone(family, policy, PLENTY)
    limit = plenty["nbytes"] // 4  # of a half
    leader, other = map(
        json.loads,
        (each.stdout for each in succeeded(run_ranks(2, ranked, family, "heads", policy, limit, timeout=240))),
    )
    assert [answer for _, answer in leader["told"]] == [answer for _, answer in expected["told"]]
    assert 0 < leader["entries"] < plenty["entries"]
    assert (other["parts"], other["entries"]) == (leader["entries"],) * 2
    assert 0 < other["nbytes"] <= limit
