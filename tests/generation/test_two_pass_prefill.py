"""Prompts that are read twice: what tokens receive, against a slow reference; that nothing else is left of it."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import cache as stock

import mlx_kv
from mlx_kv import CachePolicy, compact, make_prompt_cache
from mlx_kv.cache.eviction.scores import SCORE_OF_UNREAD
from mlx_kv.communicator import LocalCommunicator
from mlx_kv.generation.decode_batch import make_distributed_caches
from mlx_kv.generation.prefill import (
    NO_INSTRUCTIONS,
    OVERLAP,
    Instructions,
    TwoPassPrefill,
    hold,
    prefill_all,
    read_chunk,
)
from mlx_kv.mlxlm.attention import AttentionCall, attention_hooked
from mlx_kv.mlxlm.traverse import attention_caches
from tests.tiny_models import VOCAB, make_model

SINKS, RECENT, BUDGET = 2, 4, 16
ASKED = Instructions(first=(7, 8, 9), later=(10, 11), answer=(12,))


def policy(**changes: Any) -> CachePolicy:
    settings: dict[str, Any] = {"budget": BUDGET, "sinks": SINKS, "keep_recent": RECENT, "margin": 4, "score": "kvzip"}
    return CachePolicy(**settings | changes)


def text(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def with_budget(caches: list[Any]) -> list[Any]:
    return [cache for cache in attention_caches(caches) if cache.evictor is not None]


# --- what tokens receive ----------------------------------------------------------------------------------------------


class Watcher:
    """Queries and keys of every call, of a model that reads in one go."""

    def __init__(self) -> None:
        self.seen: list[tuple[np.ndarray, np.ndarray, float]] = []

    def attend(self, call: AttentionCall) -> mx.array:
        self.seen.append((np.array(call.queries)[0], np.array(call.keys)[0], call.scale))
        return call.forward()


def slow_scores(model: Any, told: list[int], chunk: int, before: int = 0) -> list[np.ndarray]:
    """(H, n) of each layer with mlx-lm's own caches: text and repetition in one go, softmax of every query alone."""
    found: list[np.ndarray] = []
    for start in range(before, len(told), chunk):
        part = told[start : start + chunk]
        asked = [*ASKED.later, *told[max(before, start - OVERLAP) : start]] if start > before else list(ASKED.first)
        again = [*asked, *ASKED.answer, *part]
        watcher, caches = Watcher(), stock.make_prompt_cache(model)
        with attention_hooked(model, caches, watcher):
            mx.eval(model(mx.array([told + again]), cache=caches))
        for layer, (queries, keys, scale) in enumerate(watcher.seen):
            sinks = range(min(SINKS, start))
            group, n = len(queries) // len(keys), len(told)
            best = np.zeros((len(keys), len(part)))
            for head in range(len(queries)):
                for at in range(n, n + len(again)):
                    visible = [*sinks, *range(start, start + len(part)), *range(n, at + 1)]
                    logits = keys[head // group][visible] @ queries[head][at] * scale
                    shares = np.exp(logits - logits.max())
                    shares = (shares / shares.sum())[len(sinks) : len(sinks) + len(part)]
                    best[head // group] = np.maximum(best[head // group], shares)
            if len(found) <= layer:
                found.append(best)
            else:
                found[layer] = np.concatenate([found[layer], best], axis=1)
    return found


@given(
    count=st.integers(18, 40),
    chunk=st.integers(3, 45),
    step=st.integers(1, 50),
    bits=st.sampled_from([None, 8]),
    seed=st.integers(0, 3),
)
@pytest.mark.slow
def test_tokens_are_worth_the_most_that_they_receive(count: int, chunk: int, step: int, bits: Any, seed: int) -> None:
    model, told = make_model("llama"), text(count, seed)
    caches = make_prompt_cache(model, policy(share="head", bits=bits, group_size=32))
    TwoPassPrefill(model, caches, [told], step, ASKED, chunk=chunk).finish()
    wanted = slow_scores(model, told, chunk)
    for cache, scores in zip(caches, wanted, strict=True):
        got = np.array(cache.evictor.live_scores(0))
        np.testing.assert_allclose(got, scores, atol=1e-5 if bits is None else 0.1)
    compact(caches)
    for cache, scores in zip(caches, wanted, strict=True):
        if bits is not None:
            continue
        order = np.argsort(scores[:, SINKS : count - RECENT], axis=1)[:, ::-1] + SINKS
        for head, best in enumerate(order):
            kept = {*range(SINKS), *best[: BUDGET - SINKS - RECENT].tolist(), *range(count - RECENT, count)}
            assert len(kept ^ set(cache.positions[0, head].tolist())) <= 2  # two of nearly the same score


def test_a_second_turn_is_repeated_alone_and_the_first_keeps_its_scores() -> None:
    model, told = make_model("llama"), text(40)
    caches = make_prompt_cache(model, policy(share="head"))
    TwoPassPrefill(model, caches, [told[:22]], 9, ASKED).finish()
    first = [np.array(cache.evictor.live_scores(0)) for cache in caches]
    compact(caches)
    kept = [np.array(cache.positions[0]) for cache in caches]
    TwoPassPrefill(model, caches, [told[22:]], 9, ASKED).finish()
    for cache, before, positions in zip(caches, first, kept, strict=True):
        scores = np.array(cache.evictor.live_scores(0))
        assert scores.shape == (2, BUDGET + 18)
        known = np.take_along_axis(before, positions, axis=1)
        known[:, :SINKS] = scores[:, :SINKS]  # the order of what was kept is the cache's own
        np.testing.assert_allclose(np.sort(known[:, SINKS:]), np.sort(scores[:, SINKS:BUDGET]), atol=1e-6)
        assert (scores[:, BUDGET:] <= 1).all()
        assert (scores[:, BUDGET:] > 0).all()


def test_an_answer_between_two_prompts_does_not_make_the_first_forgotten() -> None:
    """Nothing was evicted yet: all of the first keep what they received, and go in its order."""
    model, told = make_model("llama"), text(40)
    caches = make_prompt_cache(model, policy(share="head", budget=64))
    TwoPassPrefill(model, caches, [told[:20]], 9, ASKED).finish()
    first = [np.array(cache.evictor.live_scores(0)) for cache in caches]
    model(mx.array([told[20:25]]), cache=caches)
    TwoPassPrefill(model, caches, [told[25:]], 9, ASKED).finish()
    for cache, before in zip(caches, first, strict=True):
        scores = np.array(cache.evictor.live_scores(0))
        np.testing.assert_array_equal(scores[:, :20], before)
        assert (scores[:, 20:25] > 1).all()  # they were not repeated, and are worth more than all that was
        assert ((scores[:, 25:] > 0) & (scores[:, 25:] <= 1)).all()


def test_rows_that_stand_alike_are_read_together() -> None:
    model, texts = make_model("llama"), [text(30, 1), text(30, 2)]
    together = make_prompt_cache(model, policy(share="head"))
    TwoPassPrefill(model, together, texts, 11, ASKED, chunk=13).finish()
    for row, told in enumerate(texts):
        alone = make_prompt_cache(model, policy(share="head"))
        TwoPassPrefill(model, alone, [told], 11, ASKED, chunk=13).finish()
        for one, other in zip(together, alone, strict=True):
            got, wanted = one.evictor.live_scores(row), other.evictor.live_scores(0)
            np.testing.assert_allclose(np.array(got), np.array(wanted), atol=1e-5)


def test_the_words_are_the_tokenizers() -> None:
    template = "<user>{}</user><assistant>"
    tokenizer = SimpleNamespace(
        chat_template="there is one",
        encode=lambda text, add_special_tokens: [ord(letter) for letter in text],
        apply_chat_template=lambda messages, **asked: template.format(messages[0]["content"]),
    )
    model: Any = SimpleNamespace(args=SimpleNamespace(max_position_embeddings=600))
    asked = Instructions.of(tokenizer, model)
    assert bytes(asked.answer) == b"</user><assistant>"
    assert bytes(asked.before([1, 2, 3], 0)) == b"\n\nRepeat the previous context exactly.</user><assistant>"
    later = asked.before(list(range(20)), 10)
    assert bytes(later[: -len(asked.answer)]).endswith(b"starting with" + bytes(range(2, 10)))
    assert asked.chunk_after(100) == 600 - 100 - len(asked.later) - OVERLAP - len(asked.answer)
    assert asked.chunk_after(590) == 256
    assert Instructions.of(None, model).before([1, 2, 3], 0) == []
    assert NO_INSTRUCTIONS.chunk_after(10**6) == 2048


# --- what is left of it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
@pytest.mark.parametrize("bits", [None, 8])
def test_nothing_is_left_but_what_tokens_received(family: str, bits: int | None) -> None:
    model, told = make_model(family), text(40)
    settings = {"bits": bits, "group_size": 32, "max_rollback": 0 if family == "llama" else 4}
    twice, once = (make_prompt_cache(model, policy(**settings)) for _ in range(2))
    TwoPassPrefill(model, twice, [told], 7, ASKED, chunk=15).finish()
    hold(once)
    for start in range(0, 40, 7):
        read_chunk(model, once, [told[start : start + 7]])
    for cache in with_budget(once):
        cache.release()
    for one, other in zip(attention_caches(twice), attention_caches(once), strict=True):
        assert [row[:2] for row in one.view.rows] == [row[:2] for row in other.view.rows]
        assert one.layout.parameters[:5] == other.layout.parameters[:5]
        for got, wanted in zip(one.view.buffers or (), other.view.buffers or (), strict=True):
            for plane, same in zip(got.planes, wanted.planes, strict=True):
                if one.evictor is not None:
                    assert mx.array_equal(plane[:, :, :40], same[:, :, :40])
    for cache in with_budget(twice):  # the same logits, as long as both hold all
        cache.hold()
    for cache in with_budget(once):
        cache.hold()
    logits = [model(mx.array([[5, 6]]), cache=caches) for caches in (twice, once)]
    assert mx.allclose(logits[0], logits[1], atol=1e-5)


def test_newest_tokens_as_they_came_are_put_back() -> None:
    """A repetition is longer than what their ring could take back."""
    model, prompt = make_model("llama"), text(250)
    own = policy(budget=300, bits=4, group_size=32, residual_length=RECENT)
    caches = make_prompt_cache(model, own)
    prefill_all(model, caches, prompt, 60, ASKED)
    assert [cache.offset for cache in caches] == [250] * 3
    logits = [model(mx.array([prompt[i : i + 3]]), cache=caches) for i in (0, 3)]
    other = make_prompt_cache(model, policy(budget=300, bits=4, group_size=32, residual_length=RECENT, score="recent"))
    for start in range(0, 250, 60):
        read_chunk(model, other, [prompt[start : start + 60]])
    wanted = [model(mx.array([prompt[i : i + 3]]), cache=other) for i in (0, 3)]
    assert all(mx.allclose(*pair, atol=1e-5) for pair in zip(logits, wanted, strict=True))
    compact(caches)


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    model, told = make_model("llama"), text(40)
    caches, calls, layers = make_prompt_cache(model, policy()), [0], model.model.layers

    def failing(tokens: mx.array, cache: list[Any]) -> mx.array:
        calls[0] += 1
        if calls[0] == 5:  # two layers of three have read it
            model.model.layers = [*model.model.layers[:2], None]
        logits: mx.array = model(tokens, cache=cache)
        return logits

    with pytest.raises((IndexError, AttributeError, ValueError, TypeError)):
        TwoPassPrefill(failing, caches, [told], 20, ASKED, chunk=30).finish()
    assert calls[0] == 5
    model.model.layers = layers
    assert [cache.offset for cache in caches] == [40] * 3
    assert not any(cache.evictor.paused for cache in caches)
    model(mx.array([[1]]), cache=caches)
    assert [cache.size() for cache in caches] == [BUDGET + 1] * 3


def test_nothing_is_evicted_while_it_is_held_and_files_do_not_know_it(tmp_path: Path) -> None:
    model, told = make_model("llama"), text(60)
    held, full = make_prompt_cache(model, policy()), stock.make_prompt_cache(model)
    hold(held)
    for start in range(0, 60, 13):
        chunk = mx.array([told[start : start + 13]])
        assert mx.allclose(model(chunk, cache=held), model(chunk, cache=full), atol=1e-4)
    compact(held)
    assert held[0].size() == 60
    assert copy.deepcopy(held)[0].evictor.paused
    mlx_kv.save_prompt_cache(tmp_path / "held.safetensors", held)
    loaded = mlx_kv.load_prompt_cache(tmp_path / "held.safetensors")
    for caches in (loaded, held):
        caches[0].release()
        assert caches[0].layout.parameters == make_prompt_cache(model, policy())[0].layout.parameters
        compact(caches[:1])
        assert caches[0].size() == BUDGET
    held[1].reset()
    assert not held[1].evictor.paused


# --- where scores go --------------------------------------------------------------------------------------------------


def scored() -> tuple[Any, list[Any]]:
    model = make_model("llama")
    caches = make_prompt_cache(model, policy(share="head"))
    TwoPassPrefill(model, caches, [text(40)], 40, ASKED).finish()
    return model, caches


def test_scores_go_with_copies_files_and_rows(tmp_path: Path) -> None:
    model, caches = scored()
    mlx_kv.save_prompt_cache(tmp_path / "kept.safetensors", caches)
    others = {
        "copy": copy.deepcopy(caches),
        "file": mlx_kv.load_prompt_cache(tmp_path / "kept.safetensors"),
        "state": [type(cache).from_state(cache.state) for cache in caches],
        "row": [type(cache).merge([cache, cache]).extract(1) for cache in caches],
    }
    batch = [type(cache).merge([cache, copy.deepcopy(cache), cache]) for cache in caches]
    for cache in batch:
        cache.filter([2, 0])
    others["filtered"] = [cache.extract(0) for cache in batch]
    for cache in caches:
        cache.trim(1)
    compact(caches)
    model(mx.array([text(9, 5)]), cache=caches)
    compact(caches)
    for name, own in others.items():
        for cache in own:
            cache.trim(1)
        compact(own)
        again = [type(cache).from_state(cache.state) for cache in own]  # once more between two compactions
        model(mx.array([text(9, 5)]), cache=again)
        compact(again)
        for one, other in zip(again, caches, strict=True):
            assert mx.array_equal(mx.sort(one.positions), mx.sort(other.positions)), name


def test_what_is_taken_back_is_not_taken_for_what_comes_in_its_place() -> None:
    model, caches = scored()
    for cache in caches:
        cache.trim(6)
    model(mx.array([text(10, 9)]), cache=caches)
    for cache in caches:  # the prompt was over its budget, and so compacted before the others came
        scores, positions = np.array(cache.evictor.live_scores(0)), np.array(cache.positions[0])
        assert positions.max() == 43
        assert ((scores == SCORE_OF_UNREAD) == (positions >= 34)).all()


def test_tokens_that_come_later_stay_until_the_prompt_is_gone() -> None:
    model, caches = scored()
    later: list[set[int]] = []
    for token in range(60):
        model(mx.array([[token % VOCAB]]), cache=caches)
        if caches[0].size() == BUDGET + 1:  # it was compacted just now
            later.append(set(caches[0].positions[0, 0].tolist()))
    came = 40
    for kept in later:
        newest = max(kept)
        wanted = set(range(max(came, newest - (BUDGET - SINKS)), newest + 1))
        assert {token for token in kept if token >= came} >= wanted - {newest - (BUDGET - SINKS)}


# --- who reads twice --------------------------------------------------------------------------------------------------


def test_every_way_of_reading_a_prompt_reads_it_twice() -> None:
    model, told = make_model("llama"), text(90)
    kept_by: dict[str, Any] = {}
    own = policy(share="layer")
    prefill_all(model, caches := make_prompt_cache(model, own), told[:-1], 20, NO_INSTRUCTIONS)
    compact(caches)
    wanted = [mx.sort(cache.positions).tolist() for cache in caches]
    memory = mlx_kv.PromptMemory()
    reader = mlx_kv.PromptReader(model, make_prompt_cache(model, own), told, memory, 20)
    kept_by["reader"] = reader.finish()
    kept_by["memory"] = memory.find(told)[0]  # type: ignore[index]
    for name, there in kept_by.items():
        assert [mx.sort(cache.positions).tolist() for cache in there] == wanted, name
    model(mx.array([told[-1:]]), cache=caches)
    for drafter in (None, "ngram"):
        tokens = [
            token.token
            for token in mlx_kv.batch_generate(model, None, [told, told[:30]], own, 6, drafter=drafter)
            if token.index == 0
        ]
        assert tokens == one_by_one(model, copy.deepcopy(kept_by["reader"]), told[-1], 6)
    spoken = mlx_kv.speculative_generate(model, None, None, told, 6, policy=own, drafter="ngram")
    assert [response.token for response in spoken] == tokens


def one_by_one(model: Any, caches: list[Any], token: int, count: int) -> list[int]:
    got = []
    for _ in range(count):
        token = int(mx.argmax(model(mx.array([[token]]), cache=caches)[0, -1]).item())
        got.append(token)
    return got


def test_a_sequence_that_is_cancelled_is_read_no_further() -> None:
    from engines import make_engine

    from mlx_kv.generation.sequence import TokenSequence

    engine = make_engine(make_model("llama"), set(), policy(), 2, 10)
    for index in range(3):
        engine.submit(TokenSequence(index, text(40, index), 2))
    engine.step()
    assert engine.pending == [0, 1, 2]
    engine.cancel(0)
    engine.cancel(2)
    told = []
    while engine.busy:
        told += [token.index for token in engine.step()]
    assert told == [1, 1]


def test_several_processes_do_not_read_twice() -> None:
    class Several(LocalCommunicator):
        distributed = True

    with pytest.raises(ValueError, match="has prompts read twice, which one process does alone"):
        make_distributed_caches(make_model("llama"), policy(), Several())
