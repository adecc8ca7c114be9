"""A limit of thinking in requests of each dialect: what is said, what is counted, and what follows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serving import Running, check_error, running
from thinking_models import thinker

from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.server.api import Limits

ASK = [{"role": "user", "content": "import os"}]
CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    with running(change=thinker, limits=Limits(thinking_closing=" Enough.")) as one:
        yield one


def closing(server: Running) -> int:
    """Tokens of the closing sentence."""
    return len(server.worker.default.models.tokenizer.encode(" Enough."))


def parts(path: str, answer: dict[str, Any]) -> tuple[str, str, int]:
    """Thinking, content, and tokens of thinking, of a whole answer."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        return (
            message["reasoning"],
            message["content"],
            answer["usage"]["completion_tokens_details"]["reasoning_tokens"],
        )
    if path == RESPONSES:
        texts = {each["type"]: each["content"][0]["text"] for each in answer["output"]}
        usage = answer["usage"]["output_tokens_details"]["reasoning_tokens"]
        return texts["reasoning"], texts["message"], usage
    if path == MESSAGES:
        texts = {each["type"]: each.get("thinking") or each.get("text") for each in answer["content"]}
        return texts["thinking"], texts["text"], answer["usage"]["reasoning_tokens"]
    return answer["message"]["thinking"], answer["message"]["content"], answer["reasoning_tokens"]


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK, "max_tokens": 60, "thinking_budget": 9},
    RESPONSES: {"input": "import os", "max_output_tokens": 60, "max_thinking_tokens": 9},
    MESSAGES: {"messages": ASK, "max_tokens": 60, "thinking": {"type": "enabled", "budget_tokens": 9}},
    OLLAMA: {"messages": ASK, "options": {"num_predict": 60}, "stream": False, "thinking_budget": 9},
}


@pytest.mark.parametrize("path", BODIES)
def test_thinking_ends_at_its_limit_in_each_dialect(path: str, thinking: Running) -> None:
    before = thinking.metrics.total("thinking_limits")
    thought, content, counted = parts(path, thinking.post(path, **BODIES[path]).json())
    assert thought.endswith(" Enough.")
    assert len(thinking.worker.default.models.tokenizer.encode(thought.removesuffix(" Enough."))) <= 9
    assert content
    assert "</think>" not in thought + content
    assert counted == 9 + closing(thinking)
    assert thinking.metrics.total("thinking_limits") == before + 1


def test_without_a_limit_it_never_ends(thinking: Running) -> None:
    answer = thinking.post(CHAT, messages=ASK, max_tokens=60).json()
    assert answer["choices"][0]["message"]["content"] in (None, "")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 60


def test_a_stream_has_the_same_text_and_counts(thinking: Running) -> None:
    whole = thinking.post(CHAT, **BODIES[CHAT]).json()
    said = {"reasoning": "", "content": ""}
    usage = None
    for piece in thinking.client.chat.completions.create(
        model="reference", messages=ASK, max_tokens=60, stream=True, stream_options={"include_usage": True},
        extra_body={"thinking_budget": 9},
    ):  # fmt: skip
        usage = piece.usage or usage
        for choice in piece.choices:
            for name in said:
                said[name] += getattr(choice.delta, name, None) or ""
    message = whole["choices"][0]["message"]
    assert said == {name: message[name] for name in said}
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 9 + closing(thinking)


@pytest.mark.parametrize(
    ("effort", "most"), [("minimal", 6), ("low", 12), ("medium", 30), ("high", 48), ("max", None), ("none", None)]
)
def test_efforts_are_shares_of_the_answer(effort: str, most: int | None, thinking: Running) -> None:
    answer = thinking.post(CHAT, messages=ASK, max_tokens=60, reasoning_effort=effort).json()
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == (60 if most is None else min(60, most + closing(thinking)))
    by_budget = thinking.post(CHAT, messages=ASK, max_tokens=60, reasoning_effort=effort, thinking_budget=4).json()
    assert by_budget["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4 + closing(thinking)


def test_a_grammar_begins_behind_it(thinking: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"enum": ["yes", "no"]}}}
    answer = thinking.post(CHAT, **BODIES[CHAT], response_format=form).json()["choices"][0]["message"]
    assert answer["content"] in ('"yes"', '"no"')


def test_the_server_has_a_limit_and_drafts_change_nothing() -> None:
    said = []
    for drafting in (DraftSettings(), DraftSettings(drafter="ngram")):
        with running(change=thinker, limits=Limits(thinking_budget=9), drafting=drafting, draft=False) as server:
            answer = server.post(CHAT, messages=ASK, max_tokens=80).json()
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 9
            said.append(answer["choices"][0]["message"])
            most = server.post(CHAT, messages=ASK, max_tokens=80, reasoning_effort="max").json()
            assert most["usage"]["completion_tokens_details"]["reasoning_tokens"] == 80
            mine = server.post(CHAT, messages=ASK, max_tokens=80, thinking_budget=3).json()
            assert mine["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    assert said[0] == said[1]


def test_limits_that_are_none(thinking: Running) -> None:
    assert "thinking_budget" in check_error(thinking.post(CHAT, messages=ASK, thinking_budget=-1), 400)["message"]
    thinking_field = {"type": "enabled", "budget_tokens": "many"}
    assert thinking.post(MESSAGES, messages=ASK, max_tokens=9, thinking=thinking_field).status_code == 400
