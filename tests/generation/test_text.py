"""`mlx_kv.generate`: one call that returns the text."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

import mlx_kv
from mlx_kv.mlxlm.loading import load

PROMPT = "import os\nimport sys\n\n\ndef main():"


def streamed(reference: tuple[Any, Any], prompt: Any, **options: Any) -> str:
    return "".join(each.text for each in mlx_kv.stream_generate(*reference, prompt, max_tokens=40, **options))


@pytest.mark.slow
def test_it_returns_what_is_streamed(reference: tuple[Any, Any], draft: Any) -> None:
    wanted, ids = streamed(reference, PROMPT), reference[1].encode(PROMPT)
    for prompt in (PROMPT, ids, mx.array(ids)):
        assert mlx_kv.generate(*reference, prompt, max_tokens=40) == wanted
    assert mlx_kv.generate(*reference, PROMPT, max_tokens=40, drafter="ngram") == wanted
    assert mlx_kv.generate(*reference, PROMPT, max_tokens=40, draft_model=draft) == wanted


def test_sampling_options_reach_the_loop(reference: tuple[Any, Any]) -> None:
    options = {"sampler": mlx_kv.TemperatureSampler(1.0), "seed": 3}
    assert mlx_kv.generate(*reference, PROMPT, max_tokens=40, **options) == streamed(reference, PROMPT, **options)
    policy = mlx_kv.CachePolicy(bits=2)
    assert mlx_kv.generate(*reference, PROMPT, policy, 40) == streamed(reference, PROMPT, policy=policy)


@pytest.mark.parametrize("drafted", [{}, {"drafter": "ngram"}], ids=["plain", "ngram"])
def test_sampling_settings_are_all_of_them(drafted: dict[str, str], reference: tuple[Any, Any]) -> None:
    settings = mlx_kv.SamplingSettings(temperature=0.9, top_k=20, presence_penalty=1.0, logit_bias={5: -9}, seed=3)
    rules = mlx_kv.TemperatureSampler(0.9, top_k=20)
    options = {"sampler": rules, "seed": 3, "logits_processors": settings.processors()}
    text = mlx_kv.generate(*reference, PROMPT, max_tokens=40, sampling=settings, **drafted)
    assert text == streamed(reference, PROMPT, **options) != streamed(reference, PROMPT)
    with pytest.raises(ValueError, match="sampling and seed"):
        mlx_kv.generate(*reference, PROMPT, sampling=settings, seed=3)


@pytest.mark.parametrize("drafted", [{}, {"drafter": "ngram"}], ids=["plain", "ngram"])
def test_a_bias_of_a_token_that_the_model_does_not_have_is_refused(
    drafted: dict[str, str], reference: tuple[Any, Any]
) -> None:
    vocabulary = reference[0](mx.array([[0]])).shape[-1]
    for token in (vocabulary, 2**30):
        settings = mlx_kv.SamplingSettings(logit_bias={3: 1.0, token: 1.0})
        with pytest.raises(ValueError, match=f"token {token}, which the model does not have: give ids up to"):
            mlx_kv.generate(*reference, PROMPT, max_tokens=3, sampling=settings, **drafted)
    settings = mlx_kv.SamplingSettings(logit_bias={vocabulary - 1: 1e4})
    assert mlx_kv.generate(*reference, PROMPT, max_tokens=3, sampling=settings, **drafted)


@pytest.mark.parametrize("length", [1, 2, 5, 11])
@pytest.mark.slow
def test_a_stop_string_ends_it_wherever_tokens_end(length: int, reference: tuple[Any, Any]) -> None:
    whole = streamed(reference, PROMPT)
    for start in range(0, 30, 3):
        stop, pieces = whole[start : start + length], list[str]()
        text = mlx_kv.generate(*reference, PROMPT, max_tokens=40, stop=["never said", stop], on_text=pieces.append)
        assert text == whole[: whole.index(stop)]
        assert "".join(pieces) == text


@pytest.mark.slow
def test_the_stop_string_that_ends_first_counts_however_the_text_comes_in_pieces(reference: tuple[Any, Any]) -> None:
    whole = streamed(reference, PROMPT)
    for start in range(0, len(whole) - 9, 4):
        stops = [whole[start : start + 9], whole[start + 2 : start + 5], whole[start + 3 : start + 5]]
        ends = [(whole.index(stop) + len(stop), whole.index(stop)) for stop in stops]
        assert mlx_kv.generate(*reference, PROMPT, max_tokens=40, stop=stops) == whole[: min(ends)[1]]


def test_all_of_it_is_told_without_a_stop_string(reference: tuple[Any, Any]) -> None:
    pieces: list[str] = []
    text = mlx_kv.generate(*reference, PROMPT, max_tokens=40, stop="never said", on_text=pieces.append)
    assert "".join(pieces) == text == streamed(reference, PROMPT)
    assert len(pieces) > 5  # as it comes


def test_messages_go_through_the_template(reference: tuple[Any, Any]) -> None:
    _, tokenizer = load(mlx_kv.model_path("reference"))
    chat = [{"role": "user", "content": "import os"}]
    with pytest.raises(ValueError, match="no chat template"):
        mlx_kv.generate(reference[0], tokenizer, chat)
    tokenizer._tokenizer.chat_template = "{% for m in messages %}# {{ m['content'] }}\n{% endfor %}"
    wanted = mlx_kv.generate(reference[0], tokenizer, tokenizer.encode("# import os\n"), max_tokens=20)
    assert mlx_kv.generate(reference[0], tokenizer, chat, max_tokens=20) == wanted


def test_what_it_refuses(reference: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="empty: leave it out"):
        mlx_kv.generate(*reference, PROMPT, stop=["", "x"])
    with pytest.raises(ValueError, match="the prompt is empty"):
        mlx_kv.generate(*reference, [])
