"""The loss of a text through caches is the model's own, however it is read; what codes add to it is told with bytes."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import make_model

sys.path.append(str(Path(__file__).parent.parent / "quality"))  # characters

# isort: split
from characters import Characters

from mlx_kv import Calibration
from mlx_kv.cache.codecs import Affine
from mlx_kv.cache.eviction.calibration import BitsLoss
from mlx_kv.calibration.loss import bytes_per_token, compressed, losses, mean_and_error, measure_answers, measure_bits
from mlx_kv.files.serialization import model_fingerprint
from mlx_kv.generation.prefill import read_chunk
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.traverse import compact
from mlx_kv.policy import CachePolicy

TEXT = np.random.default_rng(0).integers(2, 90, size=150).tolist()


def own_losses(family: str) -> np.ndarray:
    """-log softmax of the model's logits over the whole text at once, without a cache, in NumPy's float64."""
    logits = np.array(make_model(family)(mx.array([TEXT])))[0].astype(np.float64)
    chances = np.exp(logits - logits.max(axis=-1, keepdims=True))
    chances /= chances.sum(axis=-1, keepdims=True)
    return np.array([-math.log(chances[i, token]) for i, token in enumerate(TEXT[1:])])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("step", [1, 7, 64, 149, None])
def test_through_plain_caches_it_is_the_models_own_in_any_chunks(family: str, step: int | None) -> None:
    own, found = own_losses(family), losses(make_model(family), TEXT, step=step)
    assert found.shape == (149,)
    np.testing.assert_allclose(found, own, rtol=1e-3, atol=1e-3)
    assert found.mean() == pytest.approx(own.mean(), abs=1e-4)


@pytest.mark.parametrize("codec", [None, "rotated"])
def test_chunks_do_not_matter_to_codes(codec: str | None) -> None:
    policy = CachePolicy(bits=(4, 4), group_size=32, codec=codec)
    once, in_steps = (losses(make_model("llama"), TEXT, policy, step=step) for step in (149, 32))
    np.testing.assert_allclose(in_steps, once, rtol=2e-2, atol=2e-2)  # a code may fall on the other side of a step
    assert in_steps.mean() == pytest.approx(once.mean(), abs=2e-3)


def test_fewer_bits_change_more_and_take_fewer_bytes() -> None:
    model = make_model("llama")
    policies = [CachePolicy(bits=bits, group_size=32) for bits in (8, 4, 2)]
    eight, four, two = (np.abs(losses(model, TEXT, policy) - losses(model, TEXT)).mean() for policy in policies)
    assert 0 < 4 * eight < four < two / 2
    # 3 layers of 2 heads, keys and values of 32 channels: codes, and two float32 for each group of 32
    assert [bytes_per_token(model, each) for each in policies] == [12 * (32 * bits // 8 + 8) for bits in (8, 4, 2)]
    assert bytes_per_token(model, CachePolicy()) == 12 * 32 * 4


def test_bits_are_measured_on_all_texts_with_the_fewest_bytes_first() -> None:
    model, texts = make_model("llama"), [TEXT[:70], TEXT[70:]]
    steps: list[int] = []
    found = measure_bits(model, texts, lambda: steps.append(1))
    assert [each.group_size for each in found] == [32] * 6  # the head dim is 32
    assert {each.codec for each in found} == {"rotated"}
    assert [each.bytes_per_token for each in found] == sorted(each.bytes_per_token for each in found)
    assert len(steps) == 12
    first = found[0]
    policy = CachePolicy(bits=(first.keys, first.values), group_size=32, codec="rotated")
    added = np.concatenate([losses(model, text, policy) - losses(model, text) for text in texts])
    assert (first.nats, first.error) == pytest.approx(mean_and_error(added), rel=1e-3, abs=1e-6)
    assert len(measure_bits(make_model("llama", head_dim=64), texts)) == 12


def loss_of(keys: int, nats: float, size: int) -> BitsLoss:
    return BitsLoss(keys, 4, 64, "rotated", size, nats, 0.015625)


@pytest.mark.parametrize(
    ("max_loss", "keys"),
    [(0.265625, 4), (0.25, 5), (0.078125, 5), (0.0625, 8), (0.015625, 8), (0.0078125, None), (0, None)],
)
def test_the_smallest_that_is_borne_is_chosen(max_loss: float, keys: int | None) -> None:
    measured = (loss_of(4, 0.25, 10), loss_of(5, 0.0625, 11), loss_of(8, -1.0, 14))
    found = Calibration("x", [[1.0, 1.0]], losses=measured).smallest_bits(max_loss)
    assert (found and found.keys) == keys


def test_what_is_no_loss_or_was_not_measured_is_refused() -> None:
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="give nats a token, 0 or more"):
            Calibration("x", [[1.0]], losses=(loss_of(4, 0.0, 1),)).smallest_bits(wrong)
    with pytest.raises(ValueError, match="has no losses of bits: run mlx-kv calibrate anew"):
        Calibration("x", [[1.0]]).smallest_bits()
    with pytest.raises(ValueError, match="has no centres of keys: run mlx-kv calibrate anew"):
        Calibration("x", [[1.0]]).centred(Affine(4, 32))


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_what_is_written_again_is_kept_as_where_it_was_read(family: str) -> None:
    model, policy = make_model(family), CachePolicy(budget=80, keep_recent=8, score="key_diff", max_write=32)
    _, found = compressed(model, TEXT, [CachePolicy(), policy])
    caches = make_prompt_cache(model, replace(policy, margin=len(TEXT)))
    for first in range(0, len(TEXT), 32):
        read_chunk(model, caches, mx.array([TEXT[first : first + 32]]))
    compact(caches)
    pairs = [(a, b) for a, b in zip(found, caches, strict=True) if getattr(a, "evictor", None) is not None]
    assert pairs
    for a, b in pairs:
        assert mx.array_equal(a.positions, b.positions)
        assert a.positions.shape[2] == 80


@pytest.mark.slow
def test_answers_are_counted_for_each_budget() -> None:
    tokens = Characters()
    model = make_model("llama", vocab_size=256, max_position_embeddings=2048)
    answers = measure_answers(model, tokens, Calibration(model_fingerprint(model), [[1.0, 3.0]] * 3))
    assert answers is not None
    assert (answers["context"], answers["questions"]) == (1024, 24)
    assert [row["budget"] for row in answers["budgets"]] == [512, 256, 128]
    assert all(0 <= row[name] <= 1 for row in answers["budgets"] for name in ("before", "after"))
    assert measure_answers(make_model("llama"), tokens, Calibration("", [[1.0]])) is None  # of 512 tokens in all


def test_the_error_is_that_of_a_mean() -> None:
    assert mean_and_error(np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx((2.5, math.sqrt(5 / 3) / 2))


def test_texts_that_say_nothing_or_are_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match="a text of 2 tokens is too short to measure a loss: give 3"):
        losses(make_model("llama"), [1, 2])
    with pytest.raises(ValueError, match="made for 512"):
        losses(make_model("llama"), [1] * 514)
