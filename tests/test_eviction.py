"""Budgets: any history equals attention over what is left, and what is left is what the score says."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from kept import FORMULAS
from oracle import Spec
from test_cache_properties import fractions, run

SCORES = sorted(FORMULAS)

specs = st.builds(
    Spec,
    bits=st.sampled_from([None, None, 8, 4]),
    rows=st.sampled_from([1, 3]),
    key_dim=st.sampled_from([32, 64]),
    value_dim=st.sampled_from([32, 64]),
    packed_decode=st.booleans(),
    reserve=st.sampled_from([0, 300]),
    budget=st.integers(9, 24),
    keep_recent=st.integers(0, 5),
    sinks=st.integers(0, 3),
    margin=st.integers(0, 6),
    score=st.sampled_from(SCORES),
    share=st.sampled_from(["layers", "layer", "head"]),
)
operations = st.one_of(
    st.tuples(st.just("update"), st.one_of(st.just(1), st.integers(1, 12), st.integers(20, 60))),
    st.tuples(st.just("update"), st.integers(1, 9)),
    st.tuples(st.just("trim_few"), st.tuples(*[st.integers(0, 9)] * 3)),
    st.tuples(st.just("trim_rows"), st.tuples(fractions, fractions, fractions)),
    st.tuples(st.sampled_from(["copy", "load", "reset", "copy", "load"]), st.none()),
)


@given(specs, st.lists(operations, min_size=2, max_size=10), st.integers(0, 1000))
def test_any_history(spec: Spec, steps: list[tuple[str, Any]], seed: int) -> None:
    run(spec, [("update", 25), *steps, ("update", 20), ("update", 2), ("update", 1)], seed)
