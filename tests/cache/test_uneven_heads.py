"""One ranking of all heads' tokens: which go, and where the others come to lie, against a slow reference."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kv.cache.eviction import compaction
from mlx_kv.cache.eviction.compaction import SAFEGUARD, RowPlan, evictable_of, lowest_of_all, slide, uneven_plan
from mlx_kv.cache.layout import Budget, Row


def adaptive_moves(
    layout: Budget, row: Row, scores: mx.array, positions: mx.array, alive: mx.array, safeguard: float = SAFEGUARD
) -> RowPlan:
    protected = layout.sinks + layout.keep_recent
    tokens = evictable_of(layout, row, scores, positions, alive)
    free = scores.shape[0] * (layout.budget - protected)
    gone = lowest_of_all(tokens, free, max(0, int(safeguard * layout.budget) - protected))
    return uneven_plan(layout, row, tokens, gone, alive)


def left(layout: Budget, scores: np.ndarray, positions: np.ndarray, alive: np.ndarray, count: int) -> list[set[int]]:
    """The slots before the recent block that keep their token, of each head."""
    heads, last = scores.shape[0], layout.sinks + scores.shape[1]
    least = max(0, int(SAFEGUARD * layout.budget) - layout.sinks - layout.keep_recent)
    kept = [{slot for slot in range(last) if alive[head, slot]} for head in range(heads)]
    free = []
    for head in range(heads):
        own = [slot for slot in kept[head] if slot >= layout.sinks]
        own.sort(key=lambda slot: (scores[head, slot - layout.sinks], positions[head, slot]))
        free += [
            (scores[head, slot - layout.sinks], positions[head, slot], head, slot) for slot in own[: len(own) - least]
        ]
    for _, _, head, slot in sorted(free)[:count]:
        kept[head].remove(slot)
    return kept


@st.composite
def cases(draw: st.DrawFn) -> tuple[Budget, Row, np.ndarray, np.ndarray, np.ndarray, int]:
    heads, sinks, recent = draw(st.integers(1, 4)), draw(st.integers(0, 3)), draw(st.integers(0, 5))
    layout = Budget(sinks + recent + draw(st.integers(1, 40)), recent, sinks)
    longer = draw(st.integers(0, 6)) if heads > 1 else 0
    end = layout.budget + longer + draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    dead = rng.multinomial(heads * longer, [0, *[1 / (heads - 1)] * (heads - 1)]) if longer else np.zeros(heads, int)
    cut = layout.cut + longer
    if dead.max() > cut - sinks:
        longer, dead, cut = 0, np.zeros(heads, int), layout.cut
        end = max(end, layout.budget + 1)
    row = Row(start=-longer or -1, offset=end + (longer or 1), extra_slots=longer)
    slots = np.arange(row.end)[None]
    alive = (slots < cut - dead[:, None]) | (slots >= cut)
    positions = np.stack([rng.permutation(row.end) for _ in range(heads)])
    scores = rng.integers(0, draw(st.sampled_from([3, 1000])), (heads, row.end - recent - sinks)).astype(np.float32)
    scores += draw(st.sampled_from([0, 500])) * np.arange(heads, dtype=np.float32)[:, None]  # heads that are worth more
    return layout, row, scores, positions, alive, heads * (layout.visible_tokens(row) - layout.budget)


def check(case: tuple[Budget, Row, np.ndarray, np.ndarray, np.ndarray, int]) -> None:
    layout, row, scores, positions, alive, count = case
    given_alive = mx.array(alive)
    found = adaptive_moves(layout, row, mx.array(scores), mx.array(positions.astype(np.int32)), given_alive)
    wanted = left(layout, scores, positions, alive, count)
    after = layout.compacted(row, found.extra_slots)
    down = slide(layout, row, after)
    assert sum(len(own) for own in wanted) + len(wanted) * layout.keep_recent == len(wanted) * layout.budget
    assert sum(found.dead.tolist()) == len(wanted) * found.extra_slots
    for head, own in enumerate(wanted):
        slots = list(range(row.end))
        for source, target in zip(*(moves[head].tolist() for moves in found.moves), strict=True):
            slots[target] = source
        gap = found.dead[head].item()
        assert sorted(slots[: layout.cut_of(after) - gap]) == sorted(own), f"head {head}"
        assert slots[: layout.sinks] == list(range(layout.sinks))
        for source, target in zip(down.source.tolist(), down.target.tolist(), strict=True):
            slots[target] = slots[source]
        recent = list(range(row.end - layout.keep_recent, row.end))
        assert slots[layout.cut_of(after) : after.end] == recent
    assert 0 in found.dead.tolist()


@given(cases())
def test_which_tokens_go_and_where_the_others_lie(case: Any) -> None:
    check(case)


def test_a_head_that_is_worth_nothing_keeps_its_safeguard(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, heads, end = Budget(50, 5, 2), 3, 90
    rng = np.random.default_rng(0)
    scores = rng.random((heads, end - 7)).astype(np.float32) + np.array([[0], [9], [9]], np.float32)
    positions, alive = np.stack([np.arange(end)] * heads), np.ones((heads, end), bool)
    case = layout, Row(offset=end), scores, positions, alive, heads * 40
    check(case)
    found = adaptive_moves(layout, case[1], mx.array(scores), mx.array(positions), mx.array(alive))
    kept = layout.budget + found.extra_slots - np.array(found.dead)
    assert kept.tolist()[0] == int(SAFEGUARD * 50)
    assert kept.sum() == heads * 50
    for broken in (0.0, 0.18, 0.22):
        less = adaptive_moves(layout, case[1], *map(mx.array, (scores, positions, alive)), broken)
        assert (layout.budget + less.extra_slots - np.array(less.dead))[0] != kept[0]
    monkeypatch.setattr(compaction, "in_order", lambda scores, ties: -ties.astype(mx.int64))  # the youngest go
    with pytest.raises(AssertionError):
        check(case)
