"""The RoPE that is found for cached keys and values undoes what the model's own RoPE does."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from families import make_family
from mlx_lm.models.rope_utils import initialize_rope
from tiny_models import make_model

from mlx_kv.cache.eviction.calibration import Rotation
from mlx_kv.mlxlm.probe import cache_ropes, measured_rotation

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0 + i / 4 for i in range(16)],
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
KINDS: dict[str, Any] = {
    "plain": lambda: nn.RoPE(32),
    "high base": lambda: nn.RoPE(32, base=1e7),
    "traditional": lambda: nn.RoPE(32, traditional=True),
    "partial": lambda: nn.RoPE(16),
    "linear": lambda: initialize_rope(32, 10000.0, False, LINEAR, 512),
    "llama3": lambda: initialize_rope(32, 10000.0, False, LLAMA3, 512),
    "yarn": lambda: initialize_rope(32, 10000.0, True, YARN, 512),
    "su": lambda: initialize_rope(32, 10000.0, False, LONG, 512),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_measured_rotation_undoes_rope_at_any_position(kind: str) -> None:
    rope = KINDS[kind]()
    rotation = measured_rotation(rope, 32)
    assert rotation is not None
    x = mx.random.normal((2, 3, 5, 32), key=mx.random.key(1))
    for first in (0, 1, 1000, 20_000):
        positions = mx.arange(first, first + 5)[None, None]
        undone = rotation.undo(rope(x[...], offset=first), positions)
        assert mx.abs(undone - x).max().item() < 1e-4 + 2e-7 * first, first


@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 1e7, 1e9])
def test_frequencies_are_exact_to_the_rounding_of_float32(base: float) -> None:
    periods = mx.array(base ** (np.arange(0, 64, 2) / 64), mx.float32)  # as scaled ones are given

    def rope(x: mx.array, offset: int) -> mx.array:
        return mx.fast.rope(x, 64, traditional=False, base=None, scale=1.0, offset=offset, freqs=periods)

    rotation = measured_rotation(rope, 64)
    assert rotation is not None
    assert np.allclose(np.array(rotation.frequencies), 1 / np.array(periods), rtol=3e-7, atol=0)
    assert np.array(rotation.pairs).tolist() == [[i, i + 32] for i in range(32)]


def test_what_is_no_rotation_is_not_found() -> None:
    assert measured_rotation(lambda x, offset: x, 32) is None
    assert measured_rotation(lambda x, offset: x + offset, 32) is None
    assert measured_rotation(lambda x: x, 32) is None


def found(model: nn.Module, index: int = 0) -> tuple[Rotation | None, Rotation | None]:
    return cache_ropes(model, (index,))[0]


def test_of_a_llama_keys_are_rotated() -> None:
    keys, values = found(make_model("llama"))
    assert keys is not None
    assert values is None


def test_of_latent_attention_the_rotated_channels_are_cached_as_values() -> None:
    keys, values = found(make_family("deepseek_v3"))
    assert keys is None
    assert values is not None


@pytest.mark.parametrize("family", ["minicpm3", "deepseek_v2"])
def test_the_last_channels_alone_may_be_rotated(family: str) -> None:
    keys, values = found(make_family(family))
    assert keys is not None
    assert keys.pairs.min().item() == 32
    assert values is None


@pytest.mark.parametrize("family", ["gpt2", "jamba"])
def test_nothing_is_undone_in_a_model_without_rope(family: str) -> None:
    index = 1 if family == "jamba" else 0
    assert found(make_family(family), index) == (None, None)


@pytest.mark.parametrize("family", ["hunyuan", "talkie"])
def test_rotations_that_cannot_be_undone_are_refused_by_name(family: str) -> None:
    """A norm after the rotation; a rotation that no module of the layer does."""
    with pytest.raises(ValueError, match=f"the keys in layer 0 of {family} change with the position, and no RoPE"):
        found(make_family(family))


def test_rope_of_another_layer_is_not_taken_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's is tried first, and none is taken that does not undo what is cached."""
    module = importlib.import_module("mlx_lm.models.llama")
    model = make_model("llama", seed=3)
    model.layers[1].self_attn.rope = nn.RoPE(32, base=77.0)
    assert isinstance(model, module.Model)
    first, second = (cache_ropes(model, (0, 1))[i][0] for i in range(2))
    assert first is not None
    assert second is not None
    assert not np.allclose(np.array(first.frequencies), np.array(second.frequencies))


def test_models_of_16_bits_are_measured_too() -> None:
    model = make_model("qwen3", seed=4)
    model.set_dtype(mx.bfloat16)
    keys, _ = found(model)
    assert keys is not None
    assert np.allclose(np.array(keys.frequencies), 10000.0 ** (-np.arange(0, 32, 2) / 32), rtol=1e-6)
