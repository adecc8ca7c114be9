"""Which families of mlx-lm show their attention, and that a patch changes nothing of what any of them says."""

from __future__ import annotations

import mlx.core as mx
import pytest
from families import WALKED, family_names, make_family, shared_family
from family_model import read, tokens
from mlx_lm.models import cache as stock

from mlx_kv.mlxlm.attention import AttentionCall, AttentionPatch, attention_seen

UNREADABLE = ("olmo",)  # no model of it can be read
# By family, of the caches of attention in the order of the model's; "seen" in all others.
LATENT = ("derived",) * 4
NOT_JUST_SEEN = {
    "afm7": ("seen", "hidden"),  # the layers that read another's tokens name no cache
    "bailing_hybrid": ("derived",) * 2,
    "bailing_moe_v3": ("derived",) * 2,
    "deepseek_v3": LATENT,
    "deepseek_v32": ("hidden",) * 4,  # a selection of the tokens
    "deepseek_v41": ("hidden",) * 4,
    "gemma2": ("hidden",) * 4,
    "gemma4": ("seen", "hidden", "hidden"),
    "gemma4_text": ("seen", "hidden", "hidden"),
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": ("hidden",) * 4,
    "iquestloopcoder": ("hidden", "hidden", "derived", "derived"),
    "kimi_k25": LATENT,
    "kimi_k3": ("derived",) * 2,
    "kimi_linear": ("derived",) * 2,
    "kimi_vl": LATENT,
    "longcat_flash": LATENT,
    "longcat_flash_ngram": LATENT,
    "minimax_m3_vl": ("seen", "derived") * 2,
    "mistral4": LATENT,
    "phi3small": ("hidden", "seen") * 2,
    "plamo": ("derived",) * 4,
    "plamo2": ("hidden",) * 2,
    "stablelm": ("derived",) * 4,
}
ASKED = [name for name in family_names() if name in WALKED or name in NOT_JUST_SEEN]


@pytest.mark.parametrize("name", [name for name in ASKED if name not in UNREADABLE])
def test_families_that_hide_their_attention_are_found(name: str) -> None:
    found = tuple(sight for sight in attention_seen(shared_family(name)) if sight is not None)
    assert found == NOT_JUST_SEEN.get(name, ("seen",) * len(found))


def test_layers_without_attention_have_none_to_see() -> None:
    assert attention_seen(shared_family("mamba")) == (None,) * 4
    assert attention_seen(shared_family("lfm2")) == (None, "seen", None, "seen")
    assert attention_seen(shared_family("deepseek_v32"))[1::2] == (None,) * 4  # indexers


def test_attention_that_passes_elsewhere_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_kv.mlxlm.attention.attention_modules", lambda model: [])
    assert attention_seen(make_family("qwen3")) == ("hidden",) * 4


def test_it_is_asked_once() -> None:
    model = shared_family("llama")
    assert attention_seen(model) is attention_seen(model)


class HandingOn:
    """Takes every call, and hands it on."""

    def __init__(self) -> None:
        self.calls = 0

    def attend(self, call: AttentionCall) -> mx.array:
        self.calls += 1
        return call.forward()


@pytest.mark.parametrize("name", [name for name in WALKED if name not in UNREADABLE])
def test_nothing_changes_bit_for_bit(name: str) -> None:
    """With a patch and nobody asking, and with one who takes every call."""
    model, everybody = shared_family(name), HandingOn()

    def answer() -> mx.array:
        return read(model, stock.make_prompt_cache(model), tokens(), [20, 1, 1])

    wanted = answer()
    with AttentionPatch(model):
        assert mx.array_equal(answer(), wanted).item()
    with AttentionPatch(model, default_hook=everybody):
        assert mx.array_equal(answer(), wanted).item()
    seen = [sight for sight in attention_seen(model) if sight in ("seen", "derived")]
    assert everybody.calls >= 3 * len(seen)
