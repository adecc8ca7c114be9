"""Copies of the layers of a sequence: whichever way they are made, each whole copy stays in step, apart from others."""

from __future__ import annotations

import copy
import gc
from collections import namedtuple
from typing import Any

import mlx.core as mx
import pytest
from engines import make_engine
from mlx_lm.models import cache as stock
from test_layer_group import POLICY, PROMPT, feed, one_sequence, positions
from tiny_models import VOCAB, make_model

from mlx_kv import CachePolicy, KVCache, batch_generate, compact, make_prompt_cache
from mlx_kv.cache.eviction.evictor import SequenceCopies
from mlx_kv.generation.sequence import TokenSequence

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


def test_a_copy_of_a_batch_takes_rows_back_from_it() -> None:
    """Each layer by itself, in the order of layers: copies, rows that leave, and copies of others that join."""
    model, policy = make_model("llama"), CachePolicy(budget=40, margin=8)
    prompts = [mx.random.randint(1, VOCAB, (1, 38), key=mx.random.key(seed)) for seed in (1, 2)]

    def read(prompt: mx.array) -> list[Any]:
        caches = make_prompt_cache(model, policy)
        model(prompt, cache=caches)
        return caches

    both = [one.merge([one, other]) for one, other in zip(*map(read, prompts), strict=True)]
    part = copy.deepcopy(both)
    for copied, original in zip(part, both, strict=True):
        copied.filter([1])
        original.filter([0])
    for copied, original in zip(part, both, strict=True):
        copied.extend(original)
        copied.extend(original)  # twice: two sequences
    rows = [read(prompts[index]) for index in (1, 0, 0)]
    for step in range(20):
        tokens = mx.array([[step + 1]])
        logits = model(mx.broadcast_to(tokens, (3, 1)), cache=part)
        for index, alone in enumerate(rows):
            assert mx.allclose(logits[index], model(tokens, cache=alone)[0], atol=1e-4)
    assert all(cache.evictor.metadata.groups[1] is part[0].evictor.metadata.groups[1] for cache in part)


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_a_prompt_that_joins_while_another_is_read_leaves_it_whole(family: str) -> None:
    model = make_model(family, max_position_embeddings=4096)
    ids = mx.random.randint(1, VOCAB, (1400,), key=mx.random.key(3)).tolist()
    prompts, policy = [ids, ids[5:35]], CachePolicy(budget=200)
    engine, got = make_engine(model, set(), policy, 4, 256), [list[int](), list[int]()]
    engine.submit(TokenSequence(0, prompts[0], 60))
    engine.step()
    engine.submit(TokenSequence(1, prompts[1], 60))
    while engine.busy:
        for token in engine.step():
            got[token.index].append(token.token)
    for prompt, tokens in zip(prompts, got, strict=True):
        alone = batch_generate(model, None, [prompt], policy, 60, max_batch_size=1, prefill_step_size=256)
        assert tokens == [token.token for token in alone]
