"""Embeddings: vectors of a plain pass over each text, in batches, with what texts share, and chunk by chunk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import VOCAB, make_model

from mlx_kv import make_prompt_cache
from mlx_kv.generation import embedding
from mlx_kv.generation.embedding import Embedder, EmbeddingCard, Pooling
from mlx_kv.mlxlm.taps import HiddenTap

FAMILIES = ("llama", "gemma3_text", "qwen3", "lfm2", "falcon_h1", "gpt_oss", "deepseek_v3", "gemma2", "llama4")
VOCABULARY = VOCAB
WAYS: tuple[Pooling, ...] = ("last", "mean", "first")


def vectors(embedder: Embedder, texts: Sequence[Sequence[int]], pooling: Pooling | None, most: int = 10**6) -> Any:
    passes = embedder.embed(texts, pooling, lambda: most)
    while True:
        try:
            next(passes)
        except StopIteration as ended:
            return ended.value


def inner_of(model: Any) -> Any:
    """Its layers and last norm, without the output head."""
    return model.get("language_model", model)["model"]


def reference(model: nn.Module, tokens: Sequence[int], pooling: Pooling) -> mx.array:
    """Of mlx-lm's own inner model, one text at a time."""
    states = inner_of(model)(mx.array([list(tokens)]))[0].astype(mx.float32)
    pooled = {"last": states[-1], "mean": states.mean(axis=0), "first": states[0]}[pooling]
    return pooled / mx.linalg.norm(pooled)


def words(seed: int, count: int) -> list[int]:
    return [(seed * 7919 + place * 104729) % VOCABULARY for place in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_what_the_output_head_reads(family: str) -> None:
    model, tokens = make_model(family), mx.array([words(1, 9)])
    tap = HiddenTap(model)
    kind = {type(each) for each in model.modules()}  # type: ignore[no-untyped-call]
    logits, states = tap(tokens, cache=make_prompt_cache(model, strict=False))
    wanted = model(tokens)
    assert mx.allclose(logits, wanted, atol=1e-4)
    assert states.shape == (1, 9, tap.width)
    assert mx.allclose(states, inner_of(model)(tokens), atol=1e-4)
    assert {type(each) for each in model.modules()} == kind  # type: ignore[no-untyped-call]


def test_a_model_without_a_head_is_refused() -> None:
    class Headless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = mx.zeros((5, 4))

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            return self.table[tokens] @ self.table.T

    with pytest.raises(ValueError, match="no output head"):
        HiddenTap(Headless())


@pytest.fixture(scope="module")
def embedders() -> dict[str, tuple[Any, Embedder]]:
    made = {}
    for family in FAMILIES:
        model = make_model(family)
        made[family] = model, Embedder(model)
    return made


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_vectors_are_those_of_each_text_alone(family: str, data: st.DataObject, embedders: Any) -> None:
    model, embedder = embedders[family]
    common = words(3, data.draw(st.sampled_from([0, 5, 64, 70])))
    texts = [
        [*common, *words(seed, count)]
        for seed, count in enumerate(data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5)))
    ]
    pooling, most = data.draw(st.sampled_from(WAYS)), data.draw(st.sampled_from([4, 16, 10**6]))
    found = vectors(embedder, texts, pooling, most)
    for tokens, vector in zip(texts, found, strict=True):
        assert float(mx.abs(vector - reference(model, tokens, pooling)).max()) < 1e-5


def test_passes_have_few_tokens_and_what_is_shared_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = Embedder(make_model("llama"))
    monkeypatch.setattr(embedding, "MOST_TOKENS", {True: 60, False: 60})
    read: list[int] = []
    texts = [[*words(1, 100), *words(seed, 10)] for seed in range(2, 12)]
    passes = embedder.embed(texts, "last", lambda: 60, lambda tokens, seconds: read.append(tokens))
    count = sum(1 for _ in passes)
    assert count == len(read)
    assert sum(read) == 100 + 10 * 10
    assert max(read) <= 60


def write(folder: Path, pooling: dict[str, Any], prompts: dict[str, Any]) -> Path:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def test_cards_say_how(tmp_path: Path) -> None:
    assert EmbeddingCard.of(tmp_path) == EmbeddingCard("last", {})
    prompts = {"prompts": {"query": "Instruct: find\nQuery:", "document": ""}}
    folder = write(tmp_path, {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, prompts)
    assert EmbeddingCard.of(folder) == EmbeddingCard("mean", prompts["prompts"])
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ValueError, match="its pooling is pooling_mode_max_tokens"):
        EmbeddingCard.of(folder)
    model = make_model("llama")
    by_card = vectors(Embedder(model, EmbeddingCard("mean")), [[1, 2, 3]], None)[0]
    assert float(mx.abs(by_card - reference(model, [1, 2, 3], "mean")).max()) < 1e-5


def test_no_pass_is_longer_and_no_copies_take_more_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    embedder, read = Embedder(make_model("llama")), list[int]()
    for _ in embedder.embed([words(1, 50), words(2, 3)], "last", lambda: 30, lambda tokens, _: read.append(tokens)):
        pass
    assert read == [30, 20, 3]
    read.clear()
    monkeypatch.setattr(embedding, "COPIED_BYTES", 1)
    texts = [[*words(1, 70), *words(seed, 10)] for seed in range(2, 6)]
    for _ in embedder.embed(texts, "last", lambda: 1_000, lambda tokens, _: read.append(tokens)):
        pass
    assert read == [70, 10, 10, 10, 10]
