"""Caches that go on side by side, and what is refused: what the tests of files have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from oracle import HEADS, QUERY_HEADS, Spec, attend
from tiny_models import VOCAB

from mlx_kv import (
    CachePolicy,
    KVCache,
    load_prompt_cache,
)

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
KINDS: dict[str, Spec] = {
    "full": Spec(reserve=300),
    "steps": Spec(step_growth=True),
    "late": Spec(quantized_start=60, bits=4),
    "values of another head dim": Spec(value_dim=32),
    "ring": Spec(ring=24, max_write=6),
    "ring with sinks": Spec(ring=24, max_write=6, sinks=3),
    "ring that has not wrapped": Spec(ring=200, max_write=20),
    "chunks": Spec(chunk=16, max_write=6),
    "budget": Spec(budget=30, keep_recent=6, sinks=2, margin=4, max_write=8),
    "budget by head": Spec(budget=30, keep_recent=6, sinks=2, margin=4, score="key_diff", share="head"),
}


def tokens_of(spec: Spec, new: int, dtype: mx.Dtype, seed: int) -> tuple[mx.array, ...]:
    """Queries, keys and values of `new` tokens."""
    keys = mx.random.split(mx.random.key(seed), 3)
    shapes = [(QUERY_HEADS, spec.key_dim), (HEADS, spec.key_dim), (HEADS, spec.value_dim)]
    return tuple(
        mx.random.normal((spec.rows, heads, new, dim), key=key).astype(dtype)
        for (heads, dim), key in zip(shapes, keys, strict=True)
    )


def go_on(caches: list[KVCache], spec: Spec, dtype: mx.Dtype) -> None:
    """The same updates and trims of all caches: outputs must be the same bits."""
    for seed, new in enumerate((1, 3, 1, 6, 1, 5, 6, 6, 6, 1, 20, 1), 100):
        first, *rest = [attend(cache, *tokens_of(spec, new, dtype, seed), None) for cache in caches]
        assert all(mx.array_equal(first, other).item() for other in rest)
        assert len({str(cache.view.rows) for cache in caches}) == 1
        if seed == 105 and caches[0].can_trim(2):
            for cache in caches:
                cache.trim(2)
        if spec.budget is not None:
            assert all(mx.array_equal(caches[0].positions, other.positions).item() for other in caches[1:])


PROMPT = mx.random.randint(1, VOCAB, (90,), key=mx.random.key(3))
AFTER = mx.random.randint(1, VOCAB, (60,), key=mx.random.key(4))
POLICIES = {
    "as it is": CachePolicy(),
    "8 bits": CachePolicy(bits=8, group_size=32),
    "budget": CachePolicy(budget=40, keep_recent=6, sinks=2, margin=5),
}


def feed(model: nn.Module, caches: list[Any], tokens: mx.array, chunk: int) -> mx.array:
    """Logits (1, n, vocabulary), the tokens read in chunks."""
    out = []
    for first in range(0, tokens.size, chunk):
        out.append(model(tokens[None, first : first + chunk], cache=caches))
        mx.eval(out[-1], [cache.state for cache in caches])
    return mx.concatenate(out, axis=1)


def filled(cache: KVCache, rows: int = 1, tokens: int = 60) -> KVCache:
    x = mx.random.normal((rows, 2, tokens, 32), key=mx.random.key(0))
    cache.update_and_fetch(x, x)
    cache.compact()
    return cache


def refused(path: Path) -> str:
    """The one line that a file is refused with."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the caller looks at the message
        load_prompt_cache(path)
    message = str(caught.value)
    assert message.count("\n") == 0
    assert str(path) in message
    assert "again" in message or "give" in message
    return message
