"""Recurrent state that goes back: to exactly what it was, in each row, or not at all."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from families import shared_family
from family_model import distance, tokens
from family_parts import VOCAB
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as stock

from mlx_kv import (
    CachePolicy,
    batch_generate,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_kv.generation.prefill import read_ragged
from mlx_kv.mlxlm.recurrent import RecurrentState, recurrent_states, with_checkpoints
from mlx_kv.mlxlm.traverse import can_trim, leaves

PRIME = 9973
SAYING = ["qwen3_next", "lfm2", "falcon_h1", "mamba2"]  # models that tell their caches what they read
COUNTED = ["jamba", "recurrent_gemma", "baichuan_m1", "bailing_moe_linear", "longcat_flash_ngram"]  # attention counts
SILENT = ["mamba", "rwkv7"]  # nobody can tell


# --- the state alone, under a layer whose state is a number that hangs on all tokens ------------------------------


def folded(text: Sequence[int]) -> list[int]:
    state = 0
    for token in text:
        state = (state * 31 + token + 1) % PRIME
    return [state, len(text)]


def layer(cache: stock.ArraysCache, rows: Sequence[Sequence[int]], says: bool) -> None:
    """Reads rows, padded to the longest, as a model does: new arrays in the place of the old ones."""
    longest = max(map(len, rows))
    old: Any = [[0, 0]] * len(rows) if cache[0] is None else mx.stack([cache[0], cache[1]], axis=1).tolist()
    lengths: Any = [longest] * len(rows) if cache.lengths is None else mx.maximum(cache.lengths, 0).tolist()
    new = []
    for (state, read), row, length in zip(old, rows, lengths, strict=True):
        for token in row[:length]:
            state = (state * 31 + token + 1) % PRIME
        new.append([state, read + min(length, len(row))])
    cache[0], cache[1] = mx.array([one for one, _ in new]), mx.array([other for _, other in new])
    if says:
        cache.advance(longest)


@dataclass
class Told:
    """What a row has read, and the lengths at which it can be again what it was."""

    text: list[int] = field(default_factory=list)
    ways: list[int] = field(default_factory=list)

    def read(self, text: list[int], most: int, checkpoints: int | None) -> None:
        if text:
            self.ways.append(len(self.text))
            self.text = self.text + text
            near = [way for way in self.ways if len(self.text) - way <= most]
            self.ways = near[max(0, len(near) - checkpoints) :] if checkpoints is not None else near


def check(cache: RecurrentState, rows: list[Told], known: bool) -> None:
    if cache[0] is not None:
        assert mx.stack([cache[0], cache[1]], axis=1).tolist() == [folded(row.text) for row in rows]
    assert cache.batch_size == len(rows)
    for index, row in enumerate(rows):
        for back in range(1, 9):
            counts = [back if other == index else 0 for other in range(len(rows))]
            assert cache.can_trim(counts) == (known and len(row.text) - back in row.ways)


@given(st.randoms(use_true_random=False), st.integers(1, 7), st.sampled_from([None, 1, 2, 4]))
def test_rows_go_back_to_what_they_were(draw: random.Random, most: int, checkpoints: int | None) -> None:
    cache, rows, known = RecurrentState(2, most, checkpoints), [Told()], True

    def read(how: str) -> None:
        nonlocal known
        ragged = draw.random() < 0.5
        least = 0 if len(rows) > 1 else 1
        lengths = [draw.randint(least, 4) for _ in rows] if ragged else [draw.randint(1, 4)] * len(rows)
        longest = max(lengths)
        if not longest:
            return
        texts = [[draw.randrange(50) for _ in range(length)] for length in lengths]
        if not known:  # the length of the pass before is unknown
            for row in rows:
                row.ways = []
        known = how != "silent"
        if ragged:
            cache.prepare(lengths=lengths, right_padding=[longest - length for length in lengths])
        cut = draw.randint(1, longest) if ragged and how == "says" else longest  # one pass, or two
        for first, last in ((0, cut), (cut, longest)):
            piece = [text[first:last] for text in texts]
            if how == "announced" and first < last:
                cache.announce(lengths)
            if first < last:
                layer(cache, piece, says=how == "says")
            for row, text in zip(rows, piece, strict=True):
                row.read(text, most, checkpoints)
        if ragged:
            cache.finalize()

    def trim() -> None:
        counts = [draw.choice([0, *(len(row.text) - way for way in row.ways)]) if known else 0 for row in rows]
        cache.trim_per_sequence(counts)
        for row, count in zip(rows, counts, strict=True):
            row.text = row.text[: len(row.text) - count]
            row.ways = [way for way in row.ways if way < len(row.text)]

    rare = ["silent", "extend", "filter", "extract", "copy"]
    for _ in range(draw.randint(1, 30)):
        done = draw.choice(rare) if draw.random() < 0.2 else draw.choice(["announced", "says", "trim"])
        rows_change = (
            done == "filter" or (done == "extract" and cache[0] is not None) or (done == "extend" and len(rows) < 4)
        )
        if rows_change and not known:
            known = True
            for row in rows:
                row.ways = []
        if done in ("announced", "says", "silent"):
            read(done)
        elif done == "trim":
            trim()
        elif done == "copy":
            left = cache
            cache = copy.deepcopy(cache)
            layer(left, [[7]] * len(rows), says=True)
        elif done == "filter":
            chosen = draw.sample(range(len(rows)), draw.randint(1, len(rows)))
            cache.filter(chosen)
            rows = [rows[index] for index in chosen]
        elif done == "extract" and rows_change:
            index = draw.randrange(len(rows))
            cache, rows = cache.extract(index), [rows[index]]
        elif done == "extend" and rows_change:
            other, text = draw.choice([RecurrentState(2, most, checkpoints), stock.ArraysCache(2)]), [3, 1, 4]
            layer(other, [text], says=True)
            is_ours = isinstance(other, RecurrentState) and most >= 3 and checkpoints != 0
            rows = [*rows, Told(text, [0] if is_ours else [])]
            if draw.random() < 0.5:
                cache.extend(other)
            else:
                cache = cache.merge([*[cache.extract(row) for row in range(len(rows) - 1)], other])
        check(cache, rows, known)


def test_what_it_holds_is_bounded_and_counted() -> None:
    cache = RecurrentState(1, 4)
    for step in range(20):
        cache[0] = mx.zeros((1, 8)) + step
        cache.advance(1)
    assert cache.nbytes == 5 * 32
    assert [cache.can_trim(n) for n in range(6)] == [True] * 5 + [False]
    cache.trim(3)
    assert cache[0][0, 0].item() == 16
    assert cache.nbytes == 2 * 32
    cache[0] = mx.zeros((1, 8))
    cache.advance(500)  # a prompt: there is no way back, and nothing is kept for one
    assert cache.nbytes == 32
    cache[0] = mx.zeros((1, 8))
    cache[0] = mx.zeros((1, 8))  # a model that does not say what it reads: the last state, in case that somebody does
    cache[0] = mx.zeros((1, 8))
    assert cache.nbytes == 2 * 32


def test_refusals_say_where_one_can_go_back_to() -> None:
    cache = RecurrentState(1, 4)
    for length in (3, 1, 2):
        cache[0] = mx.zeros((1, 8))
        cache.advance(length)
    for count, message in (
        (1, "cannot trim 1 tokens: this recurrent state was not kept there; trim by 0 or 2 or 3, or read the rest"),
        (6, "trim by 0 or 2 or 3, or plan for it with max_rollback=6"),
        (-1, "was not kept there"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.trim(count)
    with pytest.raises(ValueError, match="got 2 counts to trim by, but there are 1 rows"):
        cache.trim_per_sequence([1, 2])
    cache[0] = mx.zeros((1, 8))
    with pytest.raises(ValueError, match="does not have the length of its last write; copy the caches before"):
        cache.trim(2)
    assert not cache.is_trimmable()  # mlx-lm's callers would then trim by any amount


# --- models -------------------------------------------------------------------------------------------------------


def fresh(model: Any, text: list[int]) -> mx.array:
    """Logits (VOCAB,) after a text that is read as a whole, into caches of mlx-lm's."""
    return model(mx.array([text]), cache=stock.make_prompt_cache(model))[0, -1, :VOCAB]


@pytest.mark.parametrize("family", [*SAYING, *COUNTED])
@pytest.mark.slow
def test_models_are_trimmed_in_anybodys_loop(family: str) -> None:
    """Passes of any length and trims at random: what is read next is as if what was taken back had never been read."""
    model, draw = shared_family(family), random.Random(family)
    caches, text, ways = make_prompt_cache(model, CachePolicy(max_rollback=6)), [], []
    for _ in range(25):
        new = [draw.randrange(1, VOCAB) for _ in range(draw.choice([1, 1, 1, 2, 4, 9]))]
        logits = model(mx.array([new]), cache=caches)[0, -1, :VOCAB]
        ways, text = [*ways, len(text)], text + new
        assert distance(logits, fresh(model, text)) < 1e-4
        ways = [way for way in ways if len(text) - way <= 6]
        assert [n for n in range(1, 12) if can_trim(caches, n)] == sorted(len(text) - way for way in ways)
        if ways and draw.random() < 0.5:
            back = draw.choice(ways)
            trim_prompt_cache(caches, len(text) - back, strict=True)
            text, ways = text[:back], [way for way in ways if way < back]
        if draw.random() < 0.2:
            caches = copy.deepcopy(caches)


@pytest.mark.parametrize("family", [*SAYING, *SILENT, "jamba"])
def test_models_are_trimmed_where_passes_are_announced(family: str) -> None:
    """Rows of one length, or of any where the model can read them: each goes back on its own."""
    model, draw = shared_family(family), random.Random(family)
    ragged, rows = family in SAYING, 3 if family in SAYING else 2
    each = [with_checkpoints(make_prompt_cache(model), 8) for _ in range(rows)]
    caches = [same[0].merge(list(same)) for same in zip(*each, strict=True)]
    texts: list[list[int]] = [[] for _ in range(rows)]
    for _ in range(12):
        lengths = [draw.randint(1, 5) for _ in texts] if ragged else [draw.randint(1, 5)] * rows
        new = [[draw.randrange(1, VOCAB) for _ in range(length)] for length in lengths]
        logits = read_ragged(model, caches, new)
        texts = [text + more for text, more in zip(texts, new, strict=True)]
        for row, text in enumerate(texts):
            assert distance(logits[row, lengths[row] - 1, :VOCAB], fresh(model, text)) < 1e-4
        back = [draw.choice([0, length]) for length in lengths]
        trim_prompt_cache(caches, back, strict=True)
        texts = [text[: len(text) - count] for text, count in zip(texts, back, strict=True)]


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1", "mamba2"])
def test_a_new_state_takes_as_many_rows_as_come(family: str) -> None:
    model = shared_family(family)
    caches = make_prompt_cache(model, CachePolicy(max_rollback=6))
    both = mx.concatenate([tokens(0, 9), tokens(1, 9)])
    for first, last in ((0, 4), (4, 7), (7, 9)):
        model(both[:, first:last], cache=caches)
    for state in recurrent_states(caches):
        assert state.batch_size == 2
        assert state.can_trim([2, 5])
        assert not state.can_trim([2, 3])
    for cache in leaves(caches):
        cache.trim_per_sequence([2, 5])
    logits = read_ragged(model, caches, [[3, 1], [4, 1]])[:, -1, :VOCAB]
    texts: Any = [[*both[0, :7].tolist(), 3, 1], [*both[1, :4].tolist(), 4, 1]]
    for row, text in enumerate(texts):
        assert distance(logits[row], fresh(model, text)) < 1e-4


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "falcon_h1", "mamba2", "jamba"])
def test_mlx_lms_batches_and_loop_go_on_over_them(family: str) -> None:
    model = shared_family(family)
    prompts = [tokens(seed, length)[0].tolist() for seed, length in enumerate((5, 30, 19, 1))]
    said: list[list[list[int]]] = []
    for policy in (CachePolicy(), CachePolicy(max_rollback=5)):
        said.append([[] for _ in prompts])
        for token in batch_generate(model, None, prompts, policy, 8, max_batch_size=3, prefill_step_size=8):
            said[-1][token.index].append(token.token)
    assert said[0] == said[1]
    caches = make_prompt_cache(model, CachePolicy(max_rollback=5))
    steps = generate_step(mx.array(prompts[1]), model, prompt_cache=caches, max_tokens=8)
    assert [token for token, _ in steps] == said[0][1]
    trim_prompt_cache(caches, 4, strict=True)
    read = len(prompts[1]) + 8 - 4  # the loop has read its last token, too
    wanted = fresh(model, [*(prompts[1] + said[0][1])[:read], 7])
    assert distance(model(mx.array([[7]]), cache=caches)[0, -1, :VOCAB], wanted) < 1e-4


@pytest.mark.parametrize("family", SILENT)
def test_what_nobody_can_tell_is_refused(family: str) -> None:
    model = shared_family(family)
    caches = make_prompt_cache(model, CachePolicy(max_rollback=6))
    model(tokens(0, 9), cache=caches)
    model(tokens(1, 2), cache=caches)
    with pytest.raises(ValueError, match="this recurrent state does not have the length of its last write"):
        trim_prompt_cache(caches, 2, strict=True)
    more = tokens(2, 3)
    wanted = mx.concatenate([tokens(0, 9), tokens(1, 2), more], axis=1)
    assert distance(model(more, cache=caches)[0, -1, :VOCAB], fresh(model, wanted.tolist()[0])) < 1e-4


def test_a_copy_of_one_layer_is_not_counted_by_another() -> None:
    model = shared_family("jamba")
    caches = make_prompt_cache(model, CachePolicy(max_rollback=6))
    model(tokens(0, 9), cache=caches)
    apart = [copy.deepcopy(cache) for cache in caches]
    for own in (caches, apart):
        model(tokens(1, 2), cache=own)
    assert can_trim(caches, 2)
    assert not any(state.can_trim(n) for state in recurrent_states(apart) for n in (1, 2, 3))


def test_without_a_rollback_it_stays_mlx_lms_own() -> None:
    model = shared_family("lfm2")
    assert not recurrent_states(make_prompt_cache(model))
    with pytest.raises(ValueError, match=r"is recurrent state of mlx-lm's, .* CachePolicy\(max_rollback=...\)"):
        trim_prompt_cache(make_prompt_cache(model), 1, strict=True)
    with pytest.raises(ValueError, match="can honour max_rollback"):
        make_prompt_cache(shared_family("qwen3"), CachePolicy(max_rollback=4))


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1", "mamba"])
def test_files_hold_what_mlx_lm_would_save(family: str, tmp_path: Path) -> None:
    model = shared_family(family)
    caches = make_prompt_cache(model, CachePolicy(max_rollback=4))
    stocks = stock.make_prompt_cache(model)
    for own in (caches, stocks):
        model(tokens(), cache=own)
        model(tokens(1, 1), cache=own)
    save_prompt_cache(tmp_path / "ours", caches)
    stock.save_prompt_cache(str(tmp_path / "stock.safetensors"), stocks)
    wanted = model(tokens(2, 3), cache=stocks)
    for loaded in (
        load_prompt_cache(tmp_path / "ours"),
        load_prompt_cache(tmp_path / "stock.safetensors"),
    ):
        assert not recurrent_states(loaded)
        again = with_checkpoints(copy.deepcopy(loaded), 4)
        assert distance(model(tokens(2, 3), cache=loaded), wanted) < 1e-5
        read_ragged(model, again, [[5, 6]])
        assert not can_trim(recurrent_states(again), 3)
        recurrent = recurrent_states(again)
        assert all(state.can_trim(2) for state in recurrent)
        trim_prompt_cache(recurrent, 2, strict=True)
        if family == "mamba":  # no attention that would have to go back, too
            assert distance(model(tokens(2, 3), cache=again), wanted) < 1e-5
