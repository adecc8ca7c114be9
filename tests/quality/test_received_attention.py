"""The attention that tokens receive: seen in every layer, counted right, and correlated as Spearman did."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import cache as stock
from tiny_models import VOCAB, make_model

from benchmarks.eval import tasks
from benchmarks.eval.attention import attention_received, rank_correlation
from mlx_kv import make_prompt_cache
from mlx_kv.inspection import attention_of_last, attention_weights, watched_attention
from mlx_kv.mlxlm.attention import AttentionCall, attention_hooked

SHAPE = tasks.ContextShape(rows=4, context=256, sinks=4, keep_recent=16)


def test_attention_received_sums_to_the_number_of_queries(recall_model: Any) -> None:
    trial = tasks.recall(np.random.default_rng(6), tasks.RecallLanguage(), replace(SHAPE, rows=2), 4)
    caches = make_prompt_cache(recall_model[0])
    with watched_attention(recall_model[0], caches) as seen:
        recall_model[0](mx.array(trial.context), cache=caches)
    heads = recall_model[0].args.num_key_value_heads
    assert [weights.shape for _, weights in seen] == [(2, heads, 256)] * 4
    for _, weights in seen:
        assert np.array(weights.sum(axis=2)).ravel() == pytest.approx([256] * 2 * heads, rel=1e-4)
    of_all, of_questions = attention_received(recall_model[0], trial.context, trial.questions)
    assert of_all.shape == of_questions.shape == (4, 2, 256)
    assert ((of_questions.sum(axis=2) <= 12) & (of_questions.sum(axis=2) > 0)).all()
    assert (of_all.sum(axis=2) - of_questions.sum(axis=2)).ravel() == pytest.approx([256] * 8, rel=1e-4)


@pytest.mark.parametrize(("tokens", "queries"), [(40, 9), (40, 40), (5, 64), (1, 1)])
@pytest.mark.parametrize(("family", "layers"), [("llama", [0, 1, 2]), ("gemma3_text", [1, 3])])
def test_what_the_last_tokens_look_at(family: str, layers: list[int], tokens: int, queries: int) -> None:
    """Against the whole text read at once, one softmax after the other."""
    model, text = make_model(family), [(5 * i * i + i) % VOCAB for i in range(tokens)]
    told: list[tuple[int, int]] = []
    found = attention_of_last(model, text, queries, step=7, progress=lambda *step: told.append(step))
    assert told[-1] == (tokens, tokens)
    assert list(found) == layers

    class Listener:
        def __init__(self) -> None:
            self.calls: dict[int, Any] = {}

        def attend(self, call: AttentionCall) -> mx.array:
            self.calls[id(call.cache)] = call
            return call.forward()

    caches, listener = stock.make_prompt_cache(model), Listener()
    with attention_hooked(model, caches, listener):
        model(mx.array(text)[None], cache=caches)
    for layer in layers:
        call = listener.calls[id(caches[layer])]
        asked, keys = np.array(call.queries[0], np.float64), np.array(call.keys[0], np.float64)
        group = len(asked) // len(keys)
        looking = min(queries, tokens)
        expected = np.zeros((len(keys), tokens))
        for head, own in enumerate(asked):
            for q in range(tokens - looking, tokens):
                weights = np.exp(call.scale * (keys[head // group, : q + 1] @ own[q]))
                expected[head // group, : q + 1] += weights / weights.sum() / group / looking
        np.testing.assert_allclose(found[layer], expected, atol=1e-6)


def test_attention_weights_are_those_of_mlx() -> None:
    mx.random.seed(0)
    q, k, v = (mx.random.normal((2, heads, n, 8)) for heads, n in ((4, 3), (2, 7), (2, 7)))
    addends = mx.random.normal((2, 1, 3, 7))
    for mask in ("causal", None, addends > 0, addends):
        if isinstance(mask, mx.array) and mask.dtype == mx.bool_:
            mask = mask | (mx.arange(7) == 0)
        weights = attention_weights(q, k, 0.3, mask)  # (2, 4, 3, 7)
        expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)
        np.testing.assert_allclose(np.array(weights @ mx.repeat(v, 2, axis=1)), np.array(expected), atol=1e-5)


def test_the_attention_of_a_model_is_put_back() -> None:
    from mlx_lm.models import qwen3  # no bundled model's, whose attention is answered by us while it lives

    own = qwen3.scaled_dot_product_attention
    with contextlib.suppress(RuntimeError), watched_attention(make_model("qwen3"), []):
        assert qwen3.scaled_dot_product_attention is not own
        raise RuntimeError
    assert qwen3.scaled_dot_product_attention is own


def test_attention_that_cannot_be_seen_is_an_error() -> None:
    class Hidden(nn.Module):
        pass

    with pytest.raises(ValueError, match="leave out the task correlation"), watched_attention(Hidden(), []):
        pass


def test_rank_correlation_by_hand() -> None:
    a = np.array([10.0, 20.0, 30.0, 40.0, 50.0])
    assert rank_correlation(a, np.exp(a)) == pytest.approx(1)
    assert rank_correlation(a, -a) == pytest.approx(-1)
    # Ranks 1 3 2 5 4 against 0 .. 4: the sum of squared differences is 4, 1 - 6 * 4 / (5 * 24) = 0.8.
    assert rank_correlation(a, np.array([0.1, 0.3, 0.2, 0.5, 0.4])) == pytest.approx(0.8)
    # Ties share the mean of their ranks: -1.5 -.5 .5 1.5 against -1 -1 1 1, so 4 / sqrt(5 * 4).
    assert rank_correlation(a[:4], np.array([1.0, 1.0, 2.0, 2.0])) == pytest.approx(4 / np.sqrt(20))
    assert rank_correlation(a, np.ones(5)) == 0
