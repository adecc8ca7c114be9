"""The draft that is shipped: it says what the reference model would say next, and copies what stood before."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_kv

SOURCE = Path(__file__).parent.parent / "source.txt"


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "least"), [("model", 0.4), ("mtp", 0.48)])
def test_drafted_tokens_are_right(reference: Any, draft: nn.Module, drafter: str, least: float) -> None:
    """At K = 3, on source of another project than what they read: 45% of the draft, 54% of the head."""
    model, tokenizer = reference
    drafts = draft if drafter == "model" else mlx_kv.load_draft_head("reference", model)
    tokens, counts = tokenizer.encode(SOURCE.read_text()), mlx_kv.SpeculationStatistics()
    for start in (0, 1500, 3000, 4500):
        options: Any = {"num_draft_tokens": 3, "draft_length": "fixed", "statistics": counts}
        list(mlx_kv.speculative_generate(model, drafts, None, tokens[start : start + 300], 48, **options))
    assert (counts.drafter, counts.acceptance_rate > least) == (drafter, True)


def test_the_draft_copies(draft: nn.Module) -> None:
    """Random tokens, and once more: of the second time it knows most, of the first next to nothing."""
    once = random.Random(0).sample(range(300, 4000), 40)
    guessed: Any = mx.argmax(draft(mx.array([once + once])), axis=-1)[0].tolist()
    right = [guess == token for guess, token in zip(guessed, (once + once)[1:], strict=False)]
    assert sum(right[:39]) < 4
    assert sum(right[41:]) > 20


def test_the_card_is_of_these_weights(draft: nn.Module) -> None:
    folder = Path(mlx_kv.model_path("draft"))
    measured = json.loads((folder / "measurements.json").read_text())
    parameters = sum(p.size for _, p in nn.utils.tree_flatten(draft.parameters()))
    assert measured["parameters"] == parameters
    card = (folder / "MODEL_CARD.md").read_text()
    assert f"{parameters:,}" in card
    for drafted, share in measured["accepted_by_drafted"].items():
        assert f"| {drafted} | {share:.1%} |" in card
    assert measured["accepted_by_drafted"]["3"] > 0.5
