"""Which families of mlx-lm take rows by class, and that each row of them is what it would be alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from classes import anywhere
from families import WALKED, family_names, make_family, shared_family
from family_columns import drafted, ragged
from family_model import Family
from test_visibility import NOT_JUST_SEEN, UNREADABLE

from mlx_kv.cache import row_classes
from mlx_kv.cache.segmented import SegmentedCache
from mlx_kv.generation.prefill import read_ragged
from mlx_kv.mlxlm.attention import attends_by_class
from mlx_kv.mlxlm.batching import RowsByClass
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.probe import refuses_ragged

NONE = {"mamba", "mamba2", "rwkv7"}  # no attention
OTHERWISE = {"gemma3n"}  # layers that read another's tokens


@pytest.mark.parametrize("name", [name for name in family_names() if name not in UNREADABLE])
def test_all_families_that_just_show_their_attention_take_them(name: str) -> None:
    model = shared_family(name)
    refused = name in NOT_JUST_SEEN or name in NONE | OTHERWISE or refuses_ragged(model) is not None
    assert attends_by_class(model) == (not refused)


@pytest.mark.parametrize("column", [ragged, drafted])
@pytest.mark.parametrize("name", [*WALKED, "llama", "gemma3_text", "gpt_oss", "mimo_v2_flash"])
def test_each_row_is_what_it_would_be_alone(name: str, column: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family(name)
    if name in UNREADABLE or not attends_by_class(family.model):
        return
    monkeypatch.setattr(row_classes, "assign_classes", anywhere(0))
    found = column(family)
    assert found.kind in ("exact", "as mlx-lm"), found.reason


def test_a_model_that_takes_none_keeps_what_it_has() -> None:
    model = make_family("afm7")
    caches = make_prompt_cache(model)
    assert all(got is cache for got, cache in zip(RowsByClass(model, 8).of(caches), caches, strict=True))
    model = make_family("llama")
    assert not any(isinstance(cache, SegmentedCache) for cache in RowsByClass(model, 1).of(make_prompt_cache(model)))


def test_without_its_seam_no_batch_is_kept_by_class() -> None:
    model = make_family("llama")
    rows = RowsByClass(model, 2)
    assert all(isinstance(cache, SegmentedCache) for cache in rows.of(make_prompt_cache(model)))
    rows.close()
    assert not any(isinstance(cache, SegmentedCache) for cache in rows.of(make_prompt_cache(model)))


def test_rows_of_one_class_are_read_bit_for_bit_as_ever() -> None:
    model = make_family("llama")
    rows = RowsByClass(model, 2)
    each = [rows.of(make_prompt_cache(model)) for _ in range(2)]
    batch = [one.merge([one, other]) for one, other in zip(*each, strict=True)]
    plain = [cache.merge([cache, cache]) for cache in make_prompt_cache(model)]
    texts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    for tokens in (texts, [[7], [8]]):
        assert mx.array_equal(read_ragged(model, batch, tokens), read_ragged(model, plain, tokens)).item()
    assert all(len(cache.parts) == 1 and cache.attention_hook is None for cache in batch)
    rows.close()
