"""What models are asked, and what follows: windows, counted slots, rows of a batch, layers that hold nothing."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from engines import make_engine
from families import shared_family
from family_parts import VOCAB
from mlx_lm.models import cache as stock

from mlx_kv import CachePolicy, batch_generate, load_prompt_cache, make_prompt_cache, save_prompt_cache, stream_generate
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.mlxlm.batching import padding_is_read
from mlx_kv.mlxlm.loading import model_from_config
from mlx_kv.mlxlm.probe import cache_usage, counts_slots, indexers, refuses_ragged, takes_packed, window_of
from mlx_kv.mlxlm.traverse import attention_caches, can_trim, leaves, trim_prompt_cache

READS_PADDING = ["baichuan_m1", "bailing_moe_linear", "jamba", "longcat_flash_ngram", "mamba", "nemotron_h"]
READS_PADDING += ["olmo_hybrid", "recurrent_gemma", "rwkv7"]
PROMPTS = [mx.random.randint(1, VOCAB, (n,), key=mx.random.key(n)).tolist() for n in (5, 21, 1, 14, 14)]


def prompt(length: int, seed: int = 0) -> mx.array:
    return mx.random.randint(1, VOCAB, (1, length), key=mx.random.key(seed))


def read(model: nn.Module, caches: Sequence[Any], tokens: mx.array, chunks: Sequence[int]) -> mx.array:
    out, first = [], 0
    for chunk in chunks:
        out.append(model(tokens[:, first : first + chunk], cache=caches))
        mx.eval(out[-1], [cache.state for cache in caches])
        first += chunk
    return mx.concatenate(out, axis=1)


def distance(got: mx.array, wanted: mx.array) -> float:
    difference: Any = mx.abs(got - wanted).max() / mx.abs(wanted).max()
    return float(difference.item())


class WithDeadSlots(stock.KVCache):
    """mlx-lm's cache, and so many slots more after the last token, which its masks hide."""

    extra = 64

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        queries, keys = mx.arange(self.offset, self.offset + N)[:, None], mx.arange(self.offset + N + self.extra)
        seen: mx.array = keys <= queries
        return seen

    def keys_and_values(self) -> Any:
        return [mx.pad(x, [(0, 0), (0, 0), (0, self.extra), (0, 0)]) for x in super().keys_and_values()]


@pytest.mark.parametrize(
    "family",
    ["afm7", "minimax_m3_vl", "deepseek_v32", "glm_moe_dsa", "llama4_text", "qwen3", "dbrx", "mistral4", "gptj"],
)
def test_slots_are_counted_where_dead_ones_change_what_is_said(family: str) -> None:
    model, tokens = shared_family(family), prompt(30)

    def padded(cache: Any) -> Any:
        return stock.CacheList(*map(padded, cache.caches)) if type(cache) is stock.CacheList else WithDeadSlots()

    wanted = read(model, stock.make_prompt_cache(model), tokens, [30])
    got = read(model, [padded(cache) for cache in stock.make_prompt_cache(model)], tokens, [30])
    assert counts_slots(model) == (distance(got, wanted) > 1e-3)
    assert counts_slots(model) == (family in ("afm7", "minimax_m3_vl"))


@pytest.mark.parametrize(("family", "counts"), [("phi3small", True), ("spark2_5", False), ("recurrent_gemma", False)])
def test_slots_are_counted_also_where_a_graph_cannot_be_looked_at(family: str, counts: bool) -> None:
    """phi3small's can, but its answers depend on chunks anyway."""
    assert counts_slots(shared_family(family)) == counts


@pytest.mark.parametrize("family", ["afm7", "minimax_m3_vl", "deepseek_v32"])
def test_a_budget_is_refused_with_the_reason(family: str) -> None:
    model = shared_family(family)
    why = "the number of slots" if family == "afm7" else "the indexer of its sparse attention counts slots"
    for policy in (CachePolicy(budget=100), CachePolicy(max_kv_size=100)):
        with pytest.raises(ValueError, match=f"can honour (budget|max_kv_size): .*{why}.*; leave it out"):
            make_prompt_cache(model, policy)
        with pytest.raises(ValueError, match="no layer of this model can honour"):
            batch_generate(model, None, PROMPTS, policy, draft_model=model)
    whole = attention_caches(make_prompt_cache(model, CachePolicy(budget=100), strict=False))
    assert all(cache.evictor is None for cache in whole)


def test_a_model_gets_the_window_that_it_asks_for() -> None:
    """plamo3 makes caches for 16 tokens, and masks for 17."""
    model, tokens = shared_family("plamo3"), prompt(60)
    assert window_of(model, 16) == 17
    wanted = read(model, stock.make_prompt_cache(model), tokens, [60])  # one write: all is there
    for chunks in ([60], [20, *[1] * 40], [40, 1, 7, 12]):
        assert distance(read(model, make_prompt_cache(model), tokens, chunks), wanted) < 1e-5
    assert window_of(shared_family("gemma3_text"), 16) == 16


def test_files_keep_the_window_that_a_model_asks_for(tmp_path: Path) -> None:
    model, tokens, file = shared_family("plamo3"), prompt(60), tmp_path / "ours.safetensors"
    wanted = read(model, stock.make_prompt_cache(model), tokens, [60])[:, 40:]
    caches = make_prompt_cache(model)
    read(model, caches, tokens, [40])
    save_prompt_cache(file, caches)
    assert distance(read(model, load_prompt_cache(file), tokens[:, 40:], [12, *[1] * 8]), wanted) < 1e-5
    theirs = stock.make_prompt_cache(model)
    read(model, theirs, tokens, [40])
    stock.save_prompt_cache(str(file), theirs)
    with pytest.raises(ValueError, match=r"keeps 16 tokens, as mlx-lm makes it, but layers of this model see 17: read"):
        stream_generate(model, None, [1], prompt_cache=load_prompt_cache(file))


@pytest.mark.parametrize("family", [*READS_PADDING, "lfm2", "falcon_h1", "bailing_hybrid", "qwen3_next", "llama"])
def test_recurrent_layers_that_read_padding_are_found(family: str) -> None:
    assert padding_is_read(shared_family(family)) == (family in READS_PADDING)


@pytest.mark.parametrize(
    "family", ["afm7", "gemma2", "gpt_bigcode", "llama4", "minimax_m3_vl", "qwen3", "dbrx", "gpt_oss"]
)
def test_models_that_take_no_ragged_rows_are_found(family: str) -> None:
    assert (refuses_ragged(shared_family(family)) is not None) == (family not in ("qwen3", "dbrx", "gpt_oss"))


@pytest.mark.parametrize(
    "family", ["afm7", "gpt_bigcode", "gemma2", "llama4", "mamba", "nemotron_h", "recurrent_gemma"]
)
def test_prompts_of_any_lengths_get_what_they_get_alone(family: str) -> None:
    """And those of equal lengths share a batch."""
    model, heard = shared_family(family), {}

    def listener(index: int) -> Any:
        def sampler(logprobs: mx.array) -> mx.array:
            heard.setdefault(index, []).append(logprobs[0])
            return mx.argmax(logprobs, axis=-1)

        return sampler

    engine, most = make_engine(model, set(), max_batch_size=4, prefill_step_size=8), 0
    for index, tokens in enumerate(PROMPTS):
        engine.submit(TokenSequence(index, tokens, 5, sampler=listener(index)))
    said: list[list[int]] = [[] for _ in PROMPTS]
    while engine.busy:
        told = engine.step()
        most = max(most, len(told))
        for token in told:
            said[token.index].append(token.token)
    assert most >= 2
    for index, tokens in enumerate(PROMPTS):
        whole = mx.array([[*tokens, *said[index][:-1]]])
        logits = model(whole, cache=stock.make_prompt_cache(model))[0, -5:]
        wanted = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        assert distance(mx.stack(heard[index][:5]), wanted) < 1e-4


def test_drafts_are_verified_one_row_at_a_time_where_rows_must_be_equal() -> None:
    model = shared_family("afm7")
    tokens = batch_generate(model, None, PROMPTS, max_tokens=6, draft_model=shared_family("afm7", seed=1))
    said: list[list[int]] = [[] for _ in PROMPTS]
    for token in tokens:
        said[token.index].append(token.token)
    for begin, answer in zip(PROMPTS, said, strict=True):
        whole = mx.array([[*begin, *answer[:-1]]])
        logits = model(whole, cache=stock.make_prompt_cache(model))[0, -6:]
        assert mx.argmax(logits, axis=-1).tolist() == answer


def greedy(model: nn.Module, tokens: list[int], count: int) -> list[int]:
    """With mlx-lm's own caches, one token after the other."""
    caches, said, read = stock.make_prompt_cache(model), list[int](), tokens
    for _ in range(count):
        read = [int(mx.argmax(model(mx.array([read]), cache=caches)[0, -1]).item())]
        said += read
    return said


def test_prompts_of_unknown_caches_run_one_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    model = shared_family("deepseek_v41")
    for rows in (1, 8):
        said: list[list[int]] = [[] for _ in PROMPTS]
        for token in batch_generate(model, None, PROMPTS, max_tokens=4, max_batch_size=rows):
            said[token.index].append(token.token)
        assert said == [greedy(model, tokens, 4) for tokens in PROMPTS]
    assert caplog.messages == ["LayerCache cannot share a batch: prompts run one after the other"]


def test_a_sequence_continues_from_unknown_caches() -> None:
    model, tokens = shared_family("deepseek_v41"), PROMPTS[1]
    engine, kept = make_engine(model, return_caches=True), list[tuple[list[int], list[Any]]]()
    engine.submit(TokenSequence(0, tokens, 3, keep=lambda read, caches: kept.append((read, caches))))
    engine.submit(TokenSequence(1, PROMPTS[0], 9))
    first = [token for _ in range(6) for token in engine.step() if token.index == 0]
    said, (*_, last) = [token.token for token in first], first
    assert last.caches is not None
    assert engine.rows == [1]
    assert engine.extract(1) is not None
    engine.cancel(1)
    assert not engine.busy
    assert said == greedy(model, tokens, 3)
    (read_tokens, caches), *_ = kept
    assert read_tokens == tokens[:-1]
    engine.submit(TokenSequence(2, tokens[-1:], 3, caches=caches, before=read_tokens))
    text = [*tokens, *said, 5]  # of the answer, the last token may have been read, too
    engine.submit(TokenSequence(3, text[last.caches[0].offset :], 3, caches=last.caches))
    answers: dict[int, list[int]] = {2: [], 3: []}
    while engine.busy:
        for token in engine.step():
            answers[token.index].append(token.token)
    assert answers[2] == said
    assert answers[3] == greedy(model, text, 3)


def test_layers_that_hold_nothing_do_not_forbid_a_trim() -> None:
    model, tokens = shared_family("nemotron-nas"), prompt(30)
    caches = make_prompt_cache(model)
    with pytest.raises(ValueError, match=r"cannot trim 1 tokens: layer 0 says: .* this cache holds 0"):
        trim_prompt_cache(caches, 1, strict=True)  # nothing was read: nobody knows which of them will hold nothing
    wanted = read(model, caches, tokens, [12, 8])
    assert sum(cache.empty() for cache in attention_caches(caches)) == 1
    assert can_trim(caches, 20)
    assert not can_trim(caches, 21)
    trim_prompt_cache(caches, 8, strict=True)
    assert distance(read(model, caches, tokens[:, 12:], [8]), wanted[:, 12:]) < 1e-5
    trim_prompt_cache(caches, 20, strict=True)
    with pytest.raises(ValueError, match="this cache holds 0"):
        trim_prompt_cache(caches, 1, strict=True)  # written to, and all of it taken back
    rows = [caches[0].merge([cache, cache]) for cache in make_prompt_cache(model)]
    both = mx.concatenate([tokens, tokens])
    read(model, rows, both, [20])
    trim_prompt_cache(rows, [8, 3], strict=True)
    assert [row.offset for row in attention_caches(rows)[0].view.rows] == [12, 17]


def test_speculation_goes_on_over_layers_that_hold_nothing() -> None:
    model = shared_family("nemotron-nas")
    tokens = batch_generate(model, None, PROMPTS[:2], max_tokens=8, draft_model=shared_family("nemotron-nas", seed=1))
    said: list[list[int]] = [[], []]
    for token in tokens:
        said[token.index].append(token.token)
    for begin, answer in zip(PROMPTS, said, strict=False):
        logits = model(mx.array([[*begin, *answer[:-1]]]), cache=stock.make_prompt_cache(model))[0, -8:]
        assert mx.argmax(logits, axis=-1).tolist() == answer


@pytest.mark.parametrize(
    ("family", "policy", "count", "message"),
    [
        (
            "lfm2",
            CachePolicy(),
            3,
            "layer 0 is recurrent state of mlx-lm's, which cannot go back: .*max_rollback=",
        ),
        ("gemma3_text", CachePolicy(max_write=4), 9, "is a ring that has overwritten .*max_rollback="),
        ("qwen3", CachePolicy(budget=24, keep_recent=8, margin=0), 20, "has evicted tokens .*keep_recent="),
        ("qwen3", CachePolicy(), 41, "layer 0 says: .* this cache holds 40; trim by 0 to 40"),
        ("deepseek_v41", CachePolicy(), 1, "layer 0 is a LayerCache of mlx-lm's, which takes no tokens back"),
    ],
)
def test_each_cache_says_why_it_takes_nothing_back(family: str, policy: CachePolicy, count: int, message: str) -> None:
    model = shared_family(family)
    caches = make_prompt_cache(model, policy)
    read(model, caches, prompt(40), [4] * 10)
    with pytest.raises(ValueError, match=f"cannot trim {count} tokens: .*{message}") as refusal:
        trim_prompt_cache(caches, count, strict=True)
    assert ("max_rollback" in str(refusal.value)) == ("max_rollback" in message)  # it would help no other


def test_a_fault_of_mlx_lms_own_is_told_as_one() -> None:
    model = shared_family("olmo")
    with pytest.raises(
        ValueError, match="mlx-lm's olmo cannot read a prompt: with mlx-lm's own caches, too, it ends in"
    ):
        make_prompt_cache(model)
    assert cache_usage(shared_family("olmo2")).fault is None


def test_indexers_and_what_they_select_are_found() -> None:
    assert indexers(shared_family("deepseek_v32")) == {1, 3, 5, 7}
    assert indexers(shared_family("minimax_m3_vl")) == {2, 5}
    assert indexers(shared_family("longcat_flash")) == set()  # two caches of one layer, both of attention
    assert not takes_packed(shared_family("minimax_m3_vl"), 32, 8)  # its masks have an axis for heads, far into a text
    assert takes_packed(shared_family("qwen3"), 32, 8)


def test_asking_makes_no_weights_and_is_done_once() -> None:
    config = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 128256, "model_type": "llama"}
    model = model_from_config(config, mx.bfloat16)
    gc.collect()  # what others left is no part of it
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert refuses_ragged(model) is None
    assert attention_caches(make_prompt_cache(model, CachePolicy(budget=1000, bits=8)))[0].evictor is not None
    assert mx.get_peak_memory() - before < 2**24  # a thousandth of them
    assert cache_usage(model) is cache_usage(model)
    assert list(leaves(make_prompt_cache(model)))
