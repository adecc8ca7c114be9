"""The centre of keys is the mean of what a model's layers hold, whose channels lie far from zero then cost nothing."""

from __future__ import annotations

import base64

import mlx.core as mx
import numpy as np
import pytest
from calibrations import centred
from mlx_lm.models.cache import make_prompt_cache as stock_caches
from tiny_models import make_model

from mlx_kv import CachePolicy, Calibration, KVCache, codec_names, make_prompt_cache
from mlx_kv.cache.codecs import Affine, Centre, Centred, find_codec, in_words
from mlx_kv.calibration.loss import bytes_per_token, losses, measure_centres

TEXT = np.random.default_rng(0).integers(2, 90, size=150).tolist()
FOUR = Affine(4, 32, rotate=True)


def numbers(centre: Centre | None) -> np.ndarray:
    """(H, D), read as the docstring says that they are written."""
    assert centre is not None
    return np.frombuffer(base64.b64decode(centre.numbers), "<f2").reshape(centre.heads, -1).astype(np.float64)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_it_is_the_mean_of_all_tokens(family: str) -> None:
    model = make_model(family)
    own = stock_caches(model)
    model(mx.array([TEXT]), cache=own)
    found = centred(model, TEXT)
    assert len(found.centres) == len(own)
    for centre, cache in zip(found.centres, own, strict=True):
        keys = np.array(cache.state[0])[:, :, : len(TEXT)].astype(np.float64)
        np.testing.assert_allclose(numbers(centre), keys.mean(axis=(0, 2)), rtol=2e-3, atol=2e-4)


def test_keys_that_lie_far_from_zero_cost_what_they_do_around_it() -> None:
    """A bias of keys changes no attention, and takes the range of their groups."""
    model = make_model("llama", attention_bias=True, rope_theta=1e30)
    bias = mx.random.normal(model.layers[0].self_attn.k_proj.bias.shape, key=mx.random.key(0)) * 30
    bias = mx.where(mx.arange(bias.size) % 16 < 2, 0.0, bias)  # which the rotation of positions turns

    def cost(bias: mx.array, centre: bool) -> float:
        for layer in model.layers:
            layer.self_attn.k_proj.bias = bias
        keys = centred(model, TEXT, FOUR) if centre else FOUR
        more = losses(model, TEXT, CachePolicy(codec=(keys, "plain"))) - losses(model, TEXT)
        return float(np.abs(more).mean())

    around_zero = cost(bias * 0, False)
    assert cost(bias, True) < 1.25 * around_zero
    assert cost(bias, False) > 3 * around_zero


def test_it_takes_no_bytes_and_a_calibration_has_it() -> None:
    model = make_model("llama")
    policy = CachePolicy(codec=(centred(model, TEXT, FOUR), FOUR))
    assert bytes_per_token(model, policy) == bytes_per_token(model, CachePolicy(codec=FOUR))
    assert Calibration("x", [[1.0]], centres=measure_centres(model, TEXT)).centred(FOUR) == policy.codecs[0]
    told = in_words(policy.codecs)
    assert len(told) < 200
    other = CachePolicy(codec=(centred(model, TEXT[10:], FOUR), FOUR))
    assert (policy != other, told != in_words(other.codecs), in_words(policy.codecs)) == (True, True, told)


def test_each_layer_has_its_own() -> None:
    model = make_model("gemma3_text")  # rings and full attention
    found = centred(model, TEXT, FOUR)
    caches = make_prompt_cache(model, CachePolicy(codec=(found, "plain")))
    assert [cache.view.codecs[0] for cache in caches] == [Centred(centre, FOUR) for centre in found.centres]
    assert len({cache.view.codecs[0] for cache in caches}) == len(caches)


def test_what_belongs_to_another_model_is_refused_before_anything_is_stored() -> None:
    found = centred(make_model("llama"), TEXT, FOUR)
    x = mx.ones((1, 2, 3, 64))
    template, fewer = KVCache(codec=(found, "plain")), KVCache(codec=(found.of_layer(0), "plain"))
    with pytest.raises(ValueError, match=r"another in each layer: make caches with make_prompt_cache"):
        template.update_and_fetch(x, x)
    with pytest.raises(ValueError, match=r"keys have 2 heads of 64 channels and their centre \d of 32"):
        fewer.update_and_fetch(x, x)
    assert (template.offset, fewer.offset) == (0, 0)
    deeper = make_model("llama", num_hidden_layers=len(found.centres) + 1)
    with pytest.raises(ValueError, match="there is no centre of cache"):
        make_prompt_cache(deeper, CachePolicy(codec=(found, "plain")))


def test_what_says_nothing_is_refused() -> None:
    model = make_model("llama")
    for wrong in (TEXT[:63], []):
        with pytest.raises(
            ValueError, match=rf"a text of {len(wrong)} tokens is too short to measure keys: give 64 or more"
        ):
            centred(model, wrong)
    assert "centred" in codec_names()
    with pytest.raises(ValueError, match="keys are centred by numbers of their model"):
        find_codec("centred")
    for heads, text, says in (
        (2, "AAAA!", "base64"),
        (2, "AAAAAAA=", "base64"),
        (1, "AH4=", "finite"),
        (0, "", "1 head"),
    ):
        with pytest.raises(ValueError, match=says):
            Centre(heads, text)
