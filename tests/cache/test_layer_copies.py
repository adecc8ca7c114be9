"""Copies of the layers of a sequence: whichever way they are made, each whole copy stays in step, apart from others."""

from __future__ import annotations

import copy
import gc
from collections import namedtuple
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock
from test_layer_group import POLICY, PROMPT, feed, one_sequence, positions
from tiny_models import VOCAB, make_model

from mlx_kv import CachePolicy, KVCache, compact, make_prompt_cache
from mlx_kv.cache.eviction.evictor import SequenceCopies

Held = namedtuple("Held", "first second third")


def layer_by_layer(caches: list[KVCache]) -> list[KVCache]:
    return [copy.deepcopy(cache) for cache in caches]


def as_a_tuple(caches: list[KVCache]) -> list[KVCache]:
    return list(copy.deepcopy(tuple(caches)))


def as_fields(caches: list[KVCache]) -> list[KVCache]:
    return list(copy.deepcopy(Held(*caches)))


def as_a_dict_backwards(caches: list[KVCache]) -> list[KVCache]:
    copied = copy.deepcopy({layer: caches[layer] for layer in reversed(range(len(caches)))})
    return [copied[layer] for layer in range(len(caches))]


def nested(caches: list[KVCache]) -> list[KVCache]:
    last, (first, (second,)) = copy.deepcopy((caches[2], (caches[0], (caches[1],))))
    return [first, second, last]


def in_lists_of_caches_one_by_one(caches: list[KVCache]) -> list[KVCache]:
    """As layers of models that have several caches each are copied: two of them here in the first."""
    lists = [stock.CacheList(*caches[:2]), stock.CacheList(caches[2])]
    return [cache for one in lists for cache in copy.deepcopy(one).caches]


def loaded(caches: list[KVCache]) -> list[KVCache]:
    return [KVCache.from_state(cache.state) for cache in caches]


WAYS = [
    copy.deepcopy,
    layer_by_layer,
    as_a_tuple,
    as_fields,
    as_a_dict_backwards,
    nested,
    in_lists_of_caches_one_by_one,
    loaded,
]


@pytest.mark.parametrize("replicate", WAYS)
@pytest.mark.parametrize("times", [1, 2])
def test_copies_go_their_own_way_in_step(replicate: Any, times: int) -> None:
    """Original and copies get different tokens from here on; each does what it would do alone."""
    model = make_model("llama")
    original = make_prompt_cache(model, POLICY)
    feed(model, original, PROMPT, 30)
    assert original[0].evictor.compactions
    everyone = [original, *(replicate(original) for _ in range(times))]
    tokens = [mx.random.randint(0, VOCAB, (70,), key=mx.random.key(i)) for i in range(times + 1)]
    outputs = [[] for _ in everyone]
    for first in range(0, 70, 7):  # turn by turn, so that layer_groups that are shared by mistake would mix
        for caches, text, output in zip(everyone, tokens, outputs, strict=True):
            output.append(feed(model, caches, text[first : first + 7], 7))
    for caches, text, output in zip(everyone, tokens, outputs, strict=True):
        alone = make_prompt_cache(model, POLICY)
        feed(model, alone, PROMPT, 30)
        wanted = feed(model, alone, text, 7)
        assert mx.array_equal(mx.concatenate(output, axis=1), wanted).item()
        assert positions(caches) == positions(alone)
    layer_groups = [{id(cache.evictor.metadata.groups[0]) for cache in caches} for caches in everyone]
    assert all(len(one) == 1 for one in layer_groups)
    assert len(set.union(*layer_groups)) == times + 1


def test_a_ledger_goes_with_its_sequence() -> None:
    model = make_model("llama")
    caches = make_prompt_cache(model, POLICY)
    name = caches[0].evictor.metadata.groups[0].name
    copies = [layer_by_layer(caches) for _ in range(3)]
    assert copies[2][0].evictor.metadata.groups[0] is SequenceCopies._by_name[name]._groups[0]()
    del copies, caches
    gc.collect()
    assert name not in SequenceCopies._by_name


@pytest.mark.parametrize("replicate", [copy.deepcopy, as_a_tuple, as_fields, as_a_dict_backwards, nested])
def test_a_stray_copy_of_one_layer_does_not_split_later_ones(replicate: Any) -> None:
    model = make_model("llama")
    caches = make_prompt_cache(model, POLICY)
    feed(model, caches, PROMPT, 30)
    for layer in (0, 1, 2):
        stray = copy.deepcopy(caches[layer])
        whole = replicate(caches)
        assert len({id(cache.evictor.metadata.groups[0]) for cache in whole}) == 1
        assert stray.evictor.metadata.groups[0] is not whole[0].evictor.metadata.groups[0]


def in_step(caches: list[KVCache], row: int = 0) -> bool:
    return len({id(cache.evictor.metadata.groups[row]) for cache in caches}) == 1


@pytest.mark.parametrize("look", [lambda cache: cache.extract(0), copy.deepcopy, lambda cache: cache.merge([cache])])
def test_copies_of_single_layers_do_not_split_a_later_copy(look: Any) -> None:
    """Layers that were copied to look at them, all or some, kept or not, in any order, before a copy layer by layer."""
    model = make_model("llama")
    caches = make_prompt_cache(model, POLICY)
    feed(model, caches, PROMPT, 30)
    for looked_at in ((0, 1, 2), (0,), (1,), (2,), (2, 1, 0), (0, 2)):
        for layer in looked_at:
            seen = look(caches[layer])
        kept = [look(caches[layer]) for layer in looked_at]
        whole = [look(cache) for cache in caches]
        assert in_step(whole)
        assert len({cache.evictor.metadata.groups[0] for cache in (*whole, seen, *kept)}) > 1
        feed(model, whole, PROMPT[:30], 30)
        held = positions(whole)
        assert held[0] == held[1] == held[2]


def test_a_sequence_can_be_merged_with_itself() -> None:
    caches = one_sequence(CachePolicy(budget=20, keep_recent=2, score="key_norm"), 3)
    x = mx.random.normal((3, 1, 2, 15, 32), key=mx.random.key(5))
    for cache, new in zip(caches, x, strict=True):
        cache.update_and_fetch(new, new)
    for _ in range(2):
        batch = [KVCache.merge([cache] * 3) for cache in caches]
        for cache, own in zip(batch, caches, strict=True):
            cache.extend(own)
            cache.extend(own)
        assert all(in_step(batch, row) for row in range(5))
        assert len({cache.evictor.metadata.groups[row] for cache in batch for row in range(5)}) == 5
        x = mx.random.normal((3, 5, 2, 15, 32), key=mx.random.key(6))
        for cache, new in zip(batch, x, strict=True):
            cache.update_and_fetch(new, new)
        compact(batch)
        assert batch[0].positions.tolist() == batch[1].positions.tolist() == batch[2].positions.tolist()


@pytest.mark.parametrize("copied", [[1], [2, 1, 0], [0, 1]])
def test_a_copy_that_lacks_layers_does_not_decide_alone(copied: list[int]) -> None:
    model = make_model("llama")
    caches = make_prompt_cache(model, POLICY)
    feed(model, caches, PROMPT, 30)
    x = mx.random.normal((1, 2, 1, 32))
    parts = [caches[layer].extract(0) for layer in copied]
    assert caches[0].evictor.metadata.groups[0] is not parts[0].evictor.metadata.groups[0]
    steps = (part.update_and_fetch(x, x) for _ in range(30) for part in parts)
    with pytest.raises(ValueError, match=r"was copied without layer .*copy all layers in their order, .*share='layer'"):
        list(steps)
    assert all(part.evictor.compactions == caches[0].evictor.compactions for part in parts)
