"""A model is calibrated: what is measured, resumed, refused."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from families import make_family
from tiny_models import make_model

from mlx_kv import CachePolicy, Calibration, calibrate, make_prompt_cache
from mlx_kv.calibration.fit import head_parts, read_twice
from mlx_kv.calibration.texts import MODULES, default_texts, single_text, texts_in
from mlx_kv.generation.prefill import NO_INSTRUCTIONS, Instructions, prefill_all
from mlx_kv.mlxlm.traverse import attention_caches

Texts = list[list[int]]


@pytest.fixture(scope="session")
def whole(tiny: nn.Module, texts: Texts) -> Calibration:
    return calibrate(tiny, None, texts)


def test_shares_are_those_of_kvzip(tiny: nn.Module, texts: Texts) -> None:
    caches = make_prompt_cache(tiny, CachePolicy(budget=5000, score="kvzip", share="head", keep_recent=1))
    prefill_all(tiny, caches, texts[0], 16, Instructions.of(None, tiny))
    for reading, cache in zip(read_twice(tiny, texts[0], Instructions.of(None, tiny)), caches, strict=True):
        received = cache.evictor.metadata.reread[0].received
        assert mx.allclose(reading.shares, received, rtol=1e-3, atol=1e-6)


def test_keys_and_values_are_those_that_the_model_caches(tiny: nn.Module, texts: Texts) -> None:
    from mlx_lm.models.cache import make_prompt_cache as stock

    caches = stock(tiny)
    tiny(mx.array([texts[0]]), cache=caches)
    for reading, cache in zip(read_twice(tiny, texts[0], NO_INSTRUCTIONS), caches, strict=True):
        assert mx.allclose(reading.keys, cache.keys[:, :, : cache.offset], atol=1e-4)
        assert mx.allclose(reading.values, cache.values[:, :, : cache.offset], atol=1e-4)


def test_heads_are_the_mean_of_all_texts(tiny: nn.Module, texts: Texts, whole: Calibration) -> None:
    parts = []
    for text in texts:
        readings = read_twice(tiny, text, Instructions.of(None, tiny))
        parts.append(np.stack(head_parts([np.array(own.shares) for own in readings])))
    mean = np.mean(parts, axis=0)
    assert np.allclose(np.array(whole.heads), mean / mean.mean(), atol=1e-5)


def test_the_score_ranks_by_what_was_fitted(tiny: nn.Module, texts: Texts, whole: Calibration) -> None:
    """On a text that it was fitted to: much better than nothing, with keys as a cache holds them."""
    reading = read_twice(tiny, texts[0], Instructions.of(None, tiny))[1]
    positions = mx.arange(len(texts[0]))[None, None]
    said = np.array(whole.layers[1].predicted(reading.keys, reading.values, positions)[0])
    true = np.log(np.array(reading.shares) + 1e-5)
    assert np.corrcoef(said.reshape(-1), true.reshape(-1))[0, 1] > 0.7


def test_details_tell_what_it_was_measured_on(whole: Calibration, texts: Texts) -> None:
    assert whole.details["texts"] == 12
    assert whole.details["tokens"] == sum(map(len, texts))
    assert whole.details["held_out"] == 2
    assert whole.details["quality"].keys() == {"r2", "spearman", "top_quarter"}
    assert len(whole.details["quality_by_layer"]) == len(whole.layers) == 3


def test_budgets_only_have_the_same_heads_and_no_score(tiny: nn.Module, texts: Texts, whole: Calibration) -> None:
    found = calibrate(tiny, None, texts, budgets_only=True)
    assert found.heads == whole.heads
    assert found.layers == ()


@pytest.mark.parametrize("stopped_after", [1, 5, 6, 11, 12])
def test_what_was_interrupted_continues_bit_for_bit(
    tiny: nn.Module, texts: Texts, whole: Calibration, tmp_path: Path, stopped_after: int, monkeypatch: Any
) -> None:
    def stop(done: int, total: int) -> None:
        if done == stopped_after:
            raise KeyboardInterrupt

    folder = tmp_path / "x.partial"
    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny, None, texts, progress=stop, resume=folder)
    foreign = folder / "notes.txt"
    foreign.write_text("mine")
    read: list[int] = []
    from mlx_kv.calibration import fit

    def counted(model: nn.Module, text: list[int], instructions: Instructions) -> Any:
        read.append(len(text))
        return read_twice(model, text, instructions)

    monkeypatch.setattr(fit, "read_twice", counted)
    again = calibrate(tiny, None, texts, resume=folder)
    assert again == whole
    assert again.details == whole.details
    assert read == [len(text) for text in texts[stopped_after:]]
    assert [*folder.iterdir()] == [foreign]


def interrupted(tiny: nn.Module, texts: Texts, tmp_path: Path) -> Path:
    """What a calibration leaves that ended after 8 texts."""

    def stop(done: int, total: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    folder = tmp_path / "x.partial"
    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny, None, texts, progress=stop, resume=folder)
    return folder


def test_measurements_of_other_texts_are_not_continued(tiny: nn.Module, texts: Texts, tmp_path: Path) -> None:
    folder = interrupted(tiny, texts, tmp_path)
    others = [[*text[1:], 7] for text in texts]
    assert calibrate(tiny, None, others, resume=folder) == calibrate(tiny, None, others)
    assert not folder.exists()


@pytest.mark.parametrize("name", ["state.safetensors", "held-out-005.safetensors"])
def test_damaged_measurements_are_made_again(
    tiny: nn.Module, texts: Texts, whole: Calibration, tmp_path: Path, name: str
) -> None:
    folder = interrupted(tiny, texts, tmp_path)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-5])
    assert calibrate(tiny, None, texts, resume=folder) == whole


def test_a_file_of_others_is_not_replaced(tiny: nn.Module, texts: Texts, tmp_path: Path) -> None:
    folder = tmp_path / "x.partial"
    folder.mkdir()
    (folder / "state.safetensors").write_text("mine")
    with pytest.raises(ValueError, match=r"state\.safetensors exists and is not a file of a calibration in progress"):
        calibrate(tiny, None, texts, resume=folder)
    assert (folder / "state.safetensors").read_text() == "mine"


REFUSED: dict[str, tuple[Any, str]] = {
    "few": ([[1] * 64] * 5, "got 5 texts, and a calibration takes 6 or more: give more texts"),
    "short": ([[1] * 63] * 6, "text 0 has 63 tokens, of at least 64: give longer texts"),
    "no id": ([[1] * 64] * 5 + [[96] * 64], "text 5 has the token 96"),
    "no tokenizer": (["a text"] * 6, "text 0 is a text, but there is no tokenizer"),
}


@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED)
def test_texts_are_refused(tiny: nn.Module, given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        calibrate(tiny, None, given)


def test_a_model_that_hides_its_attention_is_refused(texts: Texts) -> None:
    words = "^cannot calibrate a model of gemma2: a score of attention needs to see it, and gemma2 shows none of layer"
    with pytest.raises(ValueError, match=words):
        calibrate(make_model("gemma2"), None, texts)


def test_so_is_one_without_full_attention(texts: Texts) -> None:
    with pytest.raises(ValueError, match=r"^cannot calibrate a model of recurrent_gemma: no layer of this model can"):
        calibrate(make_family("recurrent_gemma"), None, texts)


@pytest.mark.parametrize("family", ["qwen3", "olmo3", "gpt_oss", "lfm2", "falcon_h1"])
def test_families_are_calibrated(family: str, texts: Texts) -> None:
    model = make_model(family)
    found = calibrate(model, None, texts[:6])
    caches = attention_caches(make_prompt_cache(model, CachePolicy(budget=80)))
    assert len(found.heads) == len(found.layers) == sum(cache.evictor is not None for cache in caches)


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_default_texts_are_always_the_same(reference: Any) -> None:
    _, tokenizer = reference
    found = default_texts(tokenizer, 8192)
    assert found == default_texts(tokenizer, 8192)
    assert len(found) == 26
    assert all(550 <= len(text) <= 1100 for text in found[:26])
    assert all(2700 <= len(text) <= 3000 for text in found[26:])
    assert found != default_texts(tokenizer, 2048)
    assert max(map(len, default_texts(tokenizer, 2048))) <= 1024


@pytest.mark.slow
def test_no_default_text_is_asked_about_by_the_evaluation(reference: Any) -> None:
    _, tokenizer = reference
    read, library = "\n".join(map(tokenizer.decode, default_texts(tokenizer, 8192))), Path(ast.__file__).parent
    for name in MODULES:
        lines = (library / f"{name}.py").read_text().splitlines()
        own = [line for line in lines if len(line) > 60]
        assert sum(line in read for line in own) <= 1, name
    from pydoc_data.topics import topics

    assert not any(line in read for text in topics.values() for line in text.splitlines() if len(line) > 65)


def test_one_text_for_budgets(reference: Any) -> None:
    (text,) = single_text(reference[1], 4096)
    assert len(text) == 1000


def test_a_tokenizer_of_other_words_needs_texts() -> None:
    from mlx_kv import load, model_path

    with pytest.raises(ValueError, match="this tokenizer cannot encode English text"):
        calibrate(*load(model_path("recall")))


def test_texts_of_a_directory(reference: Any, tmp_path: Path) -> None:
    _, tokenizer = reference
    (tmp_path / "a.md").write_text("A long line about nothing at all. " * 2000)
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "c.txt").write_text("short")
    (tmp_path / ".hidden").write_text("A long line about nothing at all. " * 200)
    found, left_out = texts_in(tmp_path, tokenizer, 4096)
    assert [len(text) for text in found[:8]] == [1000] * 8
    assert len(left_out) == 2
    assert "b.bin is no UTF-8 text" in left_out[0]
    (tmp_path / "a.md").unlink()
    with pytest.raises(ValueError, match="has no file with 64 tokens of UTF-8 text: give a directory of text files"):
        texts_in(tmp_path, tokenizer, 4096)
