"""`mlx-kv plan --shared-prefix`: first tokens that all sequences share are counted once, where they are held once."""

from __future__ import annotations

import json
from typing import Any

import pytest


@pytest.mark.slow
def test_shared_tokens_are_counted_once(command: Any) -> None:
    def planned(*options: str) -> dict[str, Any]:
        words = ("--model", "reference", "--batch-size", "16", "--context", "2000,5000", "--json", *options)
        answer: dict[str, Any] = json.loads(command("plan", *words).out)
        return answer

    copies, shared = planned(), planned("--shared-prefix", "4000")
    assert shared["shared_prefix"] == 4000
    for before, after in zip(copies["strategies"], shared["strategies"], strict=True):
        per_token = before["bytes_held"][0] // 16 // 2000
        assert after["bytes_held"] == [2000 * per_token, (4000 + 16 * 1000) * per_token]
    kept = "--kv-budget", "512"
    assert planned(*kept, "--shared-prefix", "4000")["strategies"][-1] == planned(*kept)["strategies"][-1]
    text = command("plan", "--model", "reference", "--batch-size", "16", "--shared-prefix", "4000").out
    assert "Up to 4,000 shared tokens are held once. With copies in each sequence: " in text
    text = command("plan", "--model", "reference", "--batch-size", "16", "--shared-prefix", "4000", *kept).out
    assert "Up to 4,000 shared tokens are held once, until a sequence has more than 576 tokens." in text
    short, few = (*kept, "--context", "500"), ("--shared-prefix", "400")  # nothing is evicted, and each has its records
    whole, once = (planned(*each)["strategies"][-1]["bytes_held"][0] for each in (short, (*short, *few)))
    assert whole - once == 15 * 400 * 4096
    text = command(
        "plan", "--model", "reference", "--batch-size", "16", "--shared-prefix", "4000", "--max-kv-size", "512"
    ).out
    assert "The 4,000 shared tokens are held by each sequence" in text
