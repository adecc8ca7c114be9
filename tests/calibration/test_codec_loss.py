"""The loss of a text through caches is the model's own, however it is read; what codes add to it is told with bytes."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import make_model

from mlx_kv.calibration.storage import CodecLoss, bytes_per_token, losses, mean_and_error
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
    policies = [CachePolicy(bits=bits, group_size=32) for bits in (8, 4, 2)]
    added = list(map(CodecLoss(make_model("llama"), TEXT).added, policies))
    more = [losses(make_model("llama"), TEXT, policy) - losses(make_model("llama"), TEXT) for policy in policies]
    eight, four, two = (np.abs(each).mean() for each in more)
    assert 0 < 4 * eight < four < two / 2
    assert [each.nats for each in added] == pytest.approx([each.mean() for each in more], abs=1e-6)
    assert added[2].ratio == math.exp(added[2].nats)
    # 3 layers of 2 heads, keys and values of 32 channels: codes, and two float32 for each group of 32
    assert [each.bytes_per_token for each in added] == [12 * (32 * bits // 8 + 8) for bits in (8, 4, 2)]
    assert bytes_per_token(make_model("llama"), CachePolicy()) == 12 * 32 * 4


def test_plain_caches_add_nothing_and_are_read_once() -> None:
    read: list[tuple[int, int]] = []
    text = CodecLoss(make_model("llama"), TEXT, step=100, progress=lambda done, total: read.append((done, total)))
    assert text.added(CachePolicy()).nats == text.added(CachePolicy()).error == 0
    assert read == [(100, 149), (149, 149)] * 3  # two policies, and the plain reading they are compared with


def test_the_error_is_that_of_a_mean() -> None:
    assert mean_and_error(np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx((2.5, math.sqrt(5 / 3) / 2))


def test_texts_that_say_nothing_or_are_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match="a text of 2 tokens is too short to measure a loss: give 3"):
        losses(make_model("llama"), [1, 2])
    with pytest.raises(ValueError, match="made for 512"):
        losses(make_model("llama"), [1] * 514)
