"""The main job on a real model: text from the reference model, its keys and values in our caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from engines import make_engine
from mlx_lm.generate import stream_generate as stock_stream_generate
from mlx_lm.models import cache as stock
from mlx_lm.sample_utils import make_sampler

import mlx_kv
from mlx_kv import (
    CachePolicy,
    FixedStep,
    PromptReader,
    batch_generate,
    cache_statistics,
    make_prompt_cache,
    speculative_generate,
    stream_generate,
)
from mlx_kv.bundled import FOLDER
from mlx_kv.generation.encoding import encode_prompt
from mlx_kv.generation.prefill import chunk_for
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.inspection import inspect_prompt

Reference = tuple[nn.Module, Any]
SOURCE = Path(mlx_kv.__file__).parent / "cache" / "kv_cache.py"


@pytest.fixture(scope="module")
def prompt(reference: Reference) -> list[int]:
    """1,500 tokens of real source."""
    tokens = encode_prompt(reference[1], SOURCE.read_text())[:1500]
    assert len(tokens) == 1500
    return tokens


def ids(responses: Any) -> list[int]:
    return [response.token for response in responses]


def stock_greedy(reference: Reference, prompt: list[int], caches: list[Any]) -> list[int]:
    return ids(stock_stream_generate(*reference, prompt, max_tokens=256, prompt_cache=caches))


@pytest.mark.slow
@pytest.mark.parametrize("prefill_step_size", [2048, 100])
def test_greedy_equals_mlx_lms_for_256_tokens(reference: Reference, prompt: list[int], prefill_step_size: int) -> None:
    wanted = stock_greedy(reference, prompt, stock.make_prompt_cache(reference[0]))
    got = ids(stream_generate(*reference, prompt, max_tokens=256, prefill_step_size=prefill_step_size))
    assert len(got) > 100
    assert got == wanted


@pytest.mark.slow
def test_greedy_on_8_bits_equals_mlx_lms_quantised_cache(reference: Reference, prompt: list[int]) -> None:
    wanted = stock_greedy(reference, prompt, [stock.QuantizedKVCache(64, 8) for _ in reference[0].layers])
    got = ids(stream_generate(*reference, prompt, policy=CachePolicy(bits=8), max_tokens=256))
    assert len(got) > 100
    assert got == wanted


@pytest.mark.slow
def test_quantising_later_equals_mlx_lms_loop_doing_it(reference: Reference, prompt: list[int]) -> None:
    options = {"kv_bits": 8, "quantized_kv_start": 1200, "prefill_step_size": 500}
    wanted = ids(stock_stream_generate(*reference, prompt, max_tokens=64, **options))
    policy = CachePolicy(bits=8, quantized_start=1200)
    assert ids(stream_generate(*reference, prompt, policy=policy, max_tokens=64, prefill_step_size=500)) == wanted


@pytest.mark.parametrize("kv_bits", [8, (8, 4)])
def test_mlx_lms_loop_quantises_our_caches_to_its_bits(kv_bits: Any, reference: Reference, prompt: list[int]) -> None:
    caches = make_prompt_cache(reference[0])
    options = {"kv_bits": kv_bits, "quantized_kv_start": 0}
    for _ in stock_stream_generate(*reference, prompt[:50], max_tokens=4, prompt_cache=caches, **options):
        pass
    for cache in caches:
        assert tuple(codec.packed.bits for codec in cache.view.codecs) == ((8, 8) if kv_bits == 8 else kv_bits)
        assert [len(tensor) for tensor in (cache.state.keys, cache.state.values)] == [3, 3]


def test_sampling_with_a_seed_equals_mlx_lms(reference: Reference, prompt: list[int]) -> None:
    runs = []
    for generate in (stream_generate, stock_stream_generate):
        mx.random.seed(7)
        runs.append(ids(generate(*reference, prompt[:50], max_tokens=40, sampler=make_sampler(temp=0.8, top_p=0.9))))
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_room_for_prompt_and_answer_is_reserved(reference: Reference, prompt: list[int]) -> None:
    caches = make_prompt_cache(reference[0], CachePolicy(growth=FixedStep()))
    responses = list(stream_generate(*reference, prompt, max_tokens=250, prompt_cache=caches, prefill_step_size=100))
    assert responses[-1].finish_reason in ("length", "stop")
    assert caches[0].capacity == 1792
    assert cache_statistics(caches).growths == 0


def test_without_a_limit_the_caller_ends_it(reference: Reference, prompt: list[int]) -> None:
    endless, limited = (mlx_kv.stream_generate(*reference, prompt, max_tokens=count) for count in (-1, 30))
    assert [next(endless).token for _ in range(30)] == [response.token for response in limited]
    endless.close()


def test_a_session_goes_on_from_its_caches(reference: Reference, prompt: list[int]) -> None:
    """Two calls that share caches equal one: nothing of the first is read again."""
    whole = ids(stream_generate(*reference, prompt[:600], max_tokens=30))
    caches = make_prompt_cache(reference[0])
    for _ in stream_generate(*reference, prompt[:400], max_tokens=1, prompt_cache=caches):
        pass
    for cache in caches:
        cache.trim(cache.offset - 400)
    assert ids(stream_generate(*reference, prompt[400:600], max_tokens=30, prompt_cache=caches)) == whole


def test_statistics_add_up(reference: Reference) -> None:
    caches = make_prompt_cache(reference[0])
    list(stream_generate(*reference, "import os\n", max_tokens=5, prompt_cache=caches))
    held = cache_statistics([*caches, stock.KVCache()])
    layers, per_token = len(caches), 2 * 2 * 64 * 4
    assert held.bytes_live == layers * caches[0].offset * per_token
    assert held.bytes_allocated == layers * 256 * per_token


def test_text_and_ids_are_the_same_prompt(reference: Reference) -> None:
    text = "def main():\n"
    by_ids = ids(stream_generate(*reference, mx.array(encode_prompt(reference[1], text)), max_tokens=10))
    assert ids(stream_generate(*reference, text, max_tokens=10)) == by_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -2}, "max_tokens is -2"),
        ({"kv_bits": 8}, r"use policy=CachePolicy\(bits=8\)"),
        ({"kv_bits": (8, 4)}, r"use policy=CachePolicy\(bits=\(8, 4\)\)"),
        ({"max_kv_size": 8}, r"use policy=CachePolicy\(max_kv_size=8\)"),
        ({"draft_model": None}, "draft_model is for speculative_generate"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5"),
        ({"prompt": mx.array([[1, 2]])}, r"the prompt has shape \(1, 2\)"),
        ({"policy": CachePolicy(), "prompt_cache": []}, "give one of them"),
    ],
)
def test_bad_input_is_refused_at_the_call(reference: Reference, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream_generate(*reference, **{"prompt": "x", **options})


def test_the_shipped_models_are_small_and_of_the_promised_shape(reference: Reference) -> None:
    assert mlx_kv.bundled_models() == ["draft", "recall", "reference"]
    size = sum(p.stat().st_size for p in FOLDER.rglob("*") if p.is_file())
    assert size <= 14e6
    args = reference[0].args
    assert (args.model_type, args.head_dim, args.num_attention_heads, args.num_key_value_heads) == ("llama", 64, 4, 2)


@pytest.mark.slow
def test_the_reference_model_recalls(reference: Reference) -> None:
    """Real recall over some distance: without it, no later claim about caches would mean anything."""
    pairs = {"river_copper": "walnut", "falcon_lemon": "zephyr", "amber_tunnel": "silver", "ocean_rabbit": "ginger"}
    head = "".join(f'settings["{key}"] = "{value}"\n' for key, value in pairs.items())
    filler = SOURCE.with_name("growth.py").read_text()
    for key, value in pairs.items():
        question = f'{head}{filler}\nassert settings["{key}"] == "'
        answer = "".join(r.text for r in stream_generate(*reference, question, max_tokens=6))
        assert answer.startswith(value), (key, answer)


# --- chunks ---------------------------------------------------------------------------------------------------------


def of_size(weights: int) -> nn.Module:
    """A model with so many weights, none of which is ever made."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = mx.zeros((weights // 1024, 1024))
    return nn.Sequential(layer)


def test_a_chunk_follows_from_the_size_of_the_model_on_a_cpu(reference: Reference) -> None:
    if mx.default_device().type != mx.DeviceType.cpu:
        assert chunk_for(of_size(10**9)) == 2048
        return
    sizes = [chunk_for(of_size(weights)) for weights in (10**6, 3 * 10**7, 6 * 10**7, 10**8, 10**9, 7 * 10**9)]
    assert sizes == [512, 512, 256, 128, 64, 64]
    packed = nn.Sequential(nn.Linear(8192, 8192), nn.Embedding(50_000, 4096))  # a prompt looks up few of the latter
    nn.quantize(packed)
    assert chunk_for(packed) == 128, "packed weights count as what they stand for"
    assert chunk_for(reference[0]) == 512


READERS: dict[str, Callable[..., Any]] = {
    "generate": lambda model, draft, tokenizer, tokens, **step: stream_generate(model, tokenizer, tokens, **step),
    "draft": lambda model, draft, tokenizer, tokens, **step: speculative_generate(model, draft, None, tokens, **step),
    "batch": lambda model, draft, tokenizer, tokens, **step: batch_generate(model, None, [tokens, tokens[:70]], **step),
    "batch with a draft": lambda model, draft, tokenizer, tokens, **step: batch_generate(
        model, None, [tokens, tokens[:70]], draft_model=draft, **step
    ),
    "inspect": lambda model, draft, tokenizer, tokens, **step: [
        inspect_prompt(model, tokens, CachePolicy(budget=80), prefill_step_size=step.get("prefill_step_size"))
    ],
    "reader": lambda model, draft, tokenizer, tokens, **step: PromptReader(
        model, make_prompt_cache(model), tokens, step=step.get("prefill_step_size")
    ).finish(),
}


@pytest.mark.parametrize("who", READERS)
def test_everybody_reads_prompts_in_the_same_chunks(
    who: str, reference: Reference, draft: nn.Module, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read at once is decided in one place, or by the caller."""
    seen: list[int] = []
    original = type(reference[0]).__call__

    def watched(self: Any, tokens: mx.array, *rest: Any, **more: Any) -> Any:
        seen.append(tokens.shape[1])
        return original(self, tokens, *rest, **more)

    monkeypatch.setattr(type(reference[0]), "__call__", watched)
    monkeypatch.setattr("mlx_kv.generation.prefill.CPU_STEPS", (32,))
    monkeypatch.setattr("mlx_kv.generation.prefill.PREFILL_STEP", 32)
    for options, wanted in (({}, 32), ({"prefill_step_size": 50}, 50)):
        if who == "eval" and options:
            continue
        seen.clear()
        for _ in READERS[who](reference[0], draft, reference[1], prompt[:150], max_tokens=2, **options):
            pass
        assert max(seen) == wanted


def test_a_long_prompt_that_joins_a_draft_keeps_nobody_waiting(draft: nn.Module, reference: Reference) -> None:
    """Others go on between two chunks, and it can be cancelled in the middle."""
    model, long = reference[0], encode_prompt(reference[1], SOURCE.read_text())[:300]
    engine = make_engine(model, set(), draft_model=draft, prefill_step_size=20)
    engine.submit(TokenSequence(0, long[:10], 60))
    engine.step()
    engine.submit(TokenSequence(1, long, 4))
    engine.submit(TokenSequence(2, long[:200], 4))
    came: list[int] = []
    for step in range(200):
        if step == 3:
            engine.cancel(2)
        tokens = engine.step()
        came += [token.index for token in tokens]
        if step == 6:
            assert set(came) == {0}, "it decodes while the others are read"
    assert came.count(1) == 4
    assert came.count(2) == 0
    assert not engine.busy
    engine.submit(TokenSequence(3, long, 4))
    engine.step()
    engine.cancel(3)  # the only one that was being read
    assert not engine.busy
    assert engine.step() == []
