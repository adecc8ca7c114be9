"""Sampling as clients ask for it: the same tokens as the generators give, log-probabilities, several answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest
from serving import LONG, SOURCE, Running, check_error, running

from mlx_kv import stream_generate
from mlx_kv.generation.sampling import SeededSampler
from mlx_kv.generation.sequence import TokenScore
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.server.output import TokenTexts

PROMPT = SOURCE[:200]
CHAT = {"messages": [{"role": "user", "content": "Write a loop."}]}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.5, "repetition_context_size": 30},
    {"temperature": 0, "logit_bias": {"5": 3, "9": -100}, "frequency_penalty": 0.5},
    {"temperature": 0.9, "top_k": 5, "seed": 3},
    {"temperature": 0.9, "min_p": 0.1, "seed": 4, "presence_penalty": 1},
    {"temperature": 1.2, "top_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.05, "seed": 5},
    {"temperature": 0},
]


@pytest.fixture(scope="module")
def drafting() -> Iterator[Running]:
    with running(max_batch_size=8, draft=True) as one:
        yield one


def alone(server: Running, kind: dict[str, Any], tokens: int = 20) -> str:
    """What the generator gives for the same settings."""
    models = server.worker.default.models
    told = dict(kind) | {"logit_bias": {int(token): value for token, value in kind.get("logit_bias", {}).items()}}
    settings = SamplingSettings(**told)
    drawn = settings.sampler(0, models.tokenizer)
    sampler: Any = drawn.rules if isinstance(drawn, SeededSampler) else drawn
    given = stream_generate(
        models.model,
        models.tokenizer,
        PROMPT,
        max_tokens=tokens,
        sampler=sampler,
        seed=settings.seed,
        logits_processors=list(settings.processors()),
    )
    return "".join(own.text for own in given)


@pytest.mark.parametrize("which", ["server", "drafting"])
@pytest.mark.slow
def test_requests_of_all_kinds_at_once_get_what_each_gets_alone(which: str, request: pytest.FixtureRequest) -> None:
    server: Running = request.getfixturevalue(which)
    wanted = [alone(server, kind) for kind in KINDS]
    assert len(set(wanted)) == len(KINDS)
    with ThreadPoolExecutor(len(KINDS)) as pool:
        got = list(pool.map(lambda kind: server.complete(PROMPT, 20, **kind), KINDS))
    assert got == wanted


@pytest.mark.parametrize("which", ["server", "drafting"])
def test_log_probabilities_are_the_models(which: str, request: pytest.FixtureRequest) -> None:
    server: Running = request.getfixturevalue(which)
    tokenizer = server.worker.default.models.tokenizer
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "model": "reference"}
    answer = server.client.completions.create(prompt=PROMPT, logprobs=3, **options).choices[0]
    told = answer.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.text_offset is not None
    assert told.top_logprobs is not None
    assert "".join(told.tokens) == answer.text
    places = zip(told.text_offset, told.tokens, strict=True)
    assert [answer.text[at : at + len(text)] for at, text in places] == told.tokens
    ids = tokenizer.encode(PROMPT)
    known = [*ids, *tokenizer.encode(answer.text, add_special_tokens=False)]
    assert len(known) == len(ids) + 12, "this text has other tokens when it is read again: choose another"
    logits = server.worker.default.models.model(mx.array([known]))[0, len(ids) - 1 : -1]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for token, value, top, row in zip(known[len(ids) :], told.token_logprobs, told.top_logprobs, logprobs, strict=True):
        assert math.isclose(value, row[token].item(), abs_tol=1e-3)
        likeliest = mx.sort(row)[-3:].tolist()
        assert [round(each, 2) for each in sorted(top.values())] == [round(each, 2) for each in likeliest]
    chat = server.client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, **options).choices[0]
    assert chat.logprobs is not None
    content = chat.logprobs.content
    assert content is not None
    assert b"".join(bytes(token.bytes or []) for token in content).decode().lstrip() == chat.message.content
    assert all(token.top_logprobs[0].token == token.token for token in content), "greedy takes the likeliest"
    assert all(len(token.top_logprobs) == 2 for token in content)


@pytest.mark.parametrize("which", ["server", "drafting"])
def test_log_probabilities_of_a_stream_are_those_of_the_whole(which: str, request: pytest.FixtureRequest) -> None:
    server: Running = request.getfixturevalue(which)
    options: dict[str, Any] = {"max_tokens": 15, "model": "reference", "temperature": 1.0, "seed": 2}
    whole = server.client.completions.create(prompt=PROMPT, logprobs=2, **options).choices[0].logprobs
    pieces = [
        piece.choices[0].logprobs
        for piece in server.client.completions.create(prompt=PROMPT, logprobs=2, stream=True, **options)
    ]
    assert whole is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [value for piece in pieces if piece is not None for value in getattr(piece, name)]
        if name in ("tokens", "text_offset"):
            assert parts == getattr(whole, name)
        assert len(parts) == 15
    chat = server.client.chat.completions.create(**CHAT, logprobs=True, stream=True, **options)
    told = [token for piece in chat if piece.choices[0].logprobs for token in piece.choices[0].logprobs.content or []]
    again = server.client.chat.completions.create(**CHAT, logprobs=True, **options).choices[0].logprobs
    assert again is not None
    assert [token.token for token in told] == [token.token for token in again.content or []]
    assert all(token.top_logprobs == [] for token in told)


def test_no_log_probabilities_unless_they_are_asked_for(server: Running) -> None:
    for body in ({}, {"logprobs": False}):
        assert server.post(prompt=PROMPT, max_tokens=2, **body).json()["choices"][0]["logprobs"] is None
    told = server.post(prompt=PROMPT, max_tokens=2, logprobs=0).json()["choices"][0]["logprobs"]
    assert (len(told["token_logprobs"]), told["top_logprobs"]) == (2, None)
    told = server.post(prompt=PROMPT, max_tokens=2, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]
    assert [len(top) for top in told["top_logprobs"]] == [1, 1]


def test_the_token_that_ends_an_answer_is_not_told_and_stop_strings_end_both(server: Running) -> None:
    text = server.complete(PROMPT, 20)
    stop = text[8:12]
    choice = server.post(prompt=PROMPT, max_tokens=20, stop=stop, logprobs=0).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert stop in "".join(choice["logprobs"]["tokens"])
    end = min(server.worker.default.models.tokenizer.eos_token_ids)
    ended = server.post(prompt=PROMPT, max_tokens=20, logit_bias={str(end): 100}, logprobs=1).json()
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["choices"][0]["logprobs"]["tokens"] == []
    assert ended["usage"]["completion_tokens"] == 1


# --- several answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_draw_by_seeds_of_their_own(server: Running, stream: bool) -> None:
    options: dict[str, Any] = {"max_tokens": 10, "temperature": 1.0, "seed": 7}
    whole = server.post(prompt=[PROMPT, SOURCE[200:260]], n=3, best_of=3, **options).json()
    said = [choice["text"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert len(set(said)) == 6
    assert said[0] == server.complete(PROMPT, **options), "the first is what one alone is"
    assert said[3] == server.complete(SOURCE[200:260], **options)
    assert said[:3] == [choice["text"] for choice in server.post(prompt=PROMPT, n=3, **options).json()["choices"]]
    assert whole["usage"]["completion_tokens"] == 60
    assert whole["usage"]["prompt_tokens"] == sum(
        server.post(prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens"]
        for prompt in (PROMPT, SOURCE[200:260])
    )
    if stream:
        texts = [""] * 3
        for piece in server.client.chat.completions.create(model="reference", n=3, stream=True, **CHAT, **options):
            texts[piece.choices[0].index] += piece.choices[0].delta.content or ""
        chat = server.client.chat.completions.create(model="reference", n=3, **CHAT, **options)
        assert texts == [choice.message.content for choice in chat.choices]
    server.wait_until_empty()


def test_answers_to_a_long_prompt_read_it_once() -> None:
    with running(max_batch_size=8, prompt_memory_bytes=2**28) as server:
        length = len(server.worker.default.models.tokenizer.encode(LONG))
        answer = server.post(prompt=LONG, n=4, max_tokens=6, temperature=1.0, seed=1).json()
        assert len(answer["choices"]) == 4
        assert server.metrics.total("prompt_tokens_cached") >= 3 * (length - 1), "three of four found it"


def test_answers_count_against_the_queue(server: Running) -> None:
    error = check_error(server.post(prompt=["a"] * 20, n=100), 400)
    assert error["message"].startswith("one request asks for 2,000 answers")
    server.wait_until_empty()


# --- defaults and refusals --------------------------------------------------------------------------------------------


def test_a_models_own_defaults_hold_where_a_request_does_not_say() -> None:
    own = SamplingSettings.of_model({"do_sample": True, "temperature": 0.8, "top_k": 4, "repetition_penalty": 1.1})
    with running(sampling=own) as server:
        same = {"temperature": 0.8, "top_k": 4, "repetition_penalty": 1.1, "seed": 6}
        assert server.complete(PROMPT, 20, seed=6) == alone(server, same)
        assert server.complete(PROMPT, 20, seed=6, top_k=0) == alone(server, same | {"top_k": 0})
        assert server.complete(PROMPT, 20, temperature=0, repetition_penalty=1) == alone(server, {})
        told = server.http.get("/v1/models").json()["data"][0]["sampling"]
        assert told == {"temperature": 0.8, "top_k": 4, "repetition_penalty": 1.1}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"best_of": 2}, "best_of"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"xtc_probability": True}, "xtc_probability"),
    ({"xtc_threshold": 0.6}, "xtc_threshold"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty"),
    ({"repetition_context_size": -1}, "repetition_context_size"),
    ({"presence_penalty": 1e9}, "presence_penalty"),
    ({"frequency_penalty": "much"}, "frequency_penalty"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"cat": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": True}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": "all"}, "logprobs"),
    ({"logprobs": 1, "echo": True}, "echo"),
    ({"top_logprobs": 3}, "top_logprobs"),
    (CHAT | {"logprobs": 3}, "logprobs"),
    (CHAT | {"top_logprobs": 3}, "top_logprobs"),
    (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=[json.dumps(body)[:60] for body, _ in REFUSED])
def test_what_cannot_be_is_refused(server: Running, body: dict[str, Any], param: str) -> None:
    chat = "messages" in body
    answer = server.post("/v1/chat/completions", **body) if chat else server.post(prompt="x", **body)
    assert check_error(answer, 400)["param"] == param


def test_fields_that_say_nothing_change_nothing(server: Running) -> None:
    nothing = {"n": 1, "best_of": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 0, "presence_penalty": 0.0}
    nothing |= {"frequency_penalty": 0, "logit_bias": {}, "logprobs": None, "top_logprobs": None}
    assert server.complete(PROMPT, 12, **nothing) == server.complete(PROMPT, 12)


# --- texts of tokens --------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer that writes tokens as the two kinds do."""

    WRITTEN = ("\u0120Caf", "\u00c3", "\u00a9", "<0xE4>", "\u2581word", None)
    TEXTS = (" Caf", "\ufffd", "\ufffd", "\ufffd", "word", "")

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return self.WRITTEN[token]

    def decode(self, tokens: list[int]) -> str:
        return self.TEXTS[tokens[0]]


def test_bytes_of_tokens_that_are_parts_of_characters() -> None:
    told = TokenTexts(Words()).of([(token, TokenScore(-math.inf, ((4, -0.5),))) for token in range(6)])
    assert b"".join(token.data for token in told[:3]).decode() == " Caf\u00e9"
    assert (told[3].data, told[4].text, told[4].data, told[5].text) == (b"\xe4", " word", b" word", "")
    assert told[0].logprob == -9999.0
    assert TokenTexts(Words()).of([(3, TokenScore(math.nan))])[0].logprob == -9999.0
    assert (told[0].top[0].text, told[0].top[0].logprob) == (" word", -0.5)
