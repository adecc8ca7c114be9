"""Answers that a request gives a form: every one follows it, by whichever field, and whoever else is served."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import mlx.core as mx
import pytest
from jsonschema import Draft202012Validator as Validator
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from random_schemas import random_schema
from serving import SOURCE, Running, check_error, running

from mlx_kv.generation import grammar as compiled
from mlx_kv.generation.grammar import LeadIn
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.server import output
from mlx_kv.server.dialects.completions import chats
from mlx_kv.server.json_http import ApiError
from mlx_kv.server.requests import RequestRules, UnknownFields

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"$ref": "#/$defs/size"}},
    "required": ["name", "size"],
    "additionalProperties": False,
    "$defs": {"size": {"enum": ["small", "large"]}},
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Which one?"}], "max_tokens": 100}
STRICT = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA, "strict": True}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


def is_valid(text: str, schema: Any = SCHEMA) -> bool:
    return bool(Validator(schema, format_checker=Validator.FORMAT_CHECKER).is_valid(json.loads(text)))


# --- fields -----------------------------------------------------------------------------------------------------------

FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": STRICT}, is_valid),
    ({"response_format": {"type": "json_schema", "name": "one", "schema": SCHEMA}}, is_valid),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_valid),
    ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    ({"response_format": {"type": "text"}, "regex": "[0-9]{3}-[a-z]{2}"}, re.compile("[0-9]{3}-[a-z]{2}").fullmatch),
    ({"json_schema": SCHEMA}, is_valid),
    ({"guided_json": json.dumps(SCHEMA)}, is_valid),
    ({"guided_regex": "(ab)+c?", "max_tokens": 200}, re.compile("(ab)+c?").fullmatch),
    ({"guided_choice": ["alpha", "be\nta", 'g"'], "temperature": 1}, ["alpha", "be\nta", 'g"'].__contains__),
    ({"grammar": 'root ::= "yes" | "no" [0-9] [0-9]'}, re.compile("yes|no[0-9]{2}").fullmatch),
    ({"guided_grammar": 'start: "yes" | /no[0-9]/'}, re.compile("yes|no[0-9]").fullmatch),
    ({"structured_outputs": {"choice": ["alpha", "beta"]}}, ["alpha", "beta"].__contains__),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, is_valid),
]


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_each_field_gives_its_form(server: Running, chat: bool) -> None:
    def ask(form: dict[str, Any]) -> str:
        body = {"max_tokens": 100, **form}
        if not chat:
            return server.complete("def first(x):\n    return ", **body)
        answer = server.post("/v1/chat/completions", **{**CHAT, **body})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, [form for form, _ in FORMS]))
    for text, (form, follows) in zip(texts, FORMS, strict=True):
        assert follows(text), (form, text)


def test_the_openai_client_parses_what_it_gets(server: Running) -> None:
    whole = server.client.chat.completions.create(model="reference", **CHAT, response_format=STRICT)  # type: ignore[call-overload]
    parts = server.client.chat.completions.create(  # type: ignore[call-overload]
        model="reference", **CHAT, response_format=STRICT, stream=True, logprobs=True, top_logprobs=3
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert whole.choices[0].finish_reason == "stop"
    assert text == whole.choices[0].message.content
    assert is_valid(text)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format", "json_schema"),
    ({"response_format": "json"}, "response_format", "object"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "no schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "response_format", "array"),
    ({"response_format": STRICT, "regex": "a"}, "response_format", "send one"),
    ({"json_schema": "{"}, "json_schema", "not JSON"),
    ({"json_schema": {"type": "foo"}}, "json_schema", "foo"),
    ({"json_schema": {"not": {}}}, "json_schema", "not"),
    ({"json_schema": {"enum": []}}, "json_schema", "Unsatisfiable"),
    ({"regex": "("}, "regex", "unclosed"),
    ({"regex": 7}, "regex", "regex is 7: send a string"),
    ({"regex": ""}, "regex", "regex is empty: send a text"),
    ({"guided_regex": ""}, "guided_regex", "is empty: send a text"),
    ({"structured_outputs": {"regex": ""}}, "regex", "is empty: send a text"),
    ({"json_schema": {"$ref": "#"}}, "json_schema", "refers to itself without end"),
    ({"grammar": "start: start"}, "grammar", "refers to itself without end"),
    ({"grammar": "root ::= ("}, "grammar", "GBNF"),
    ({"guided_choice": []}, "guided_choice", "is empty: send at least 1"),
    ({"guided_choice": [1]}, "guided_choice", "guided_choice[0] is 1: send a string"),
    ({"guided_choice": ["\ud800"]}, "guided_choice", "Unicode"),
    ({"structured_outputs": {"xml": 1}}, "structured_outputs", "xml"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice", "'no'"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "none of"),
    ({"tools": TOOLS, "tool_choice": 7}, "tool_choice", "none of"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "regex", "send one"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 7}}], "tool_choice": "required"},
        "tools",
        "object",
    ),
]


@pytest.mark.parametrize(("form", "param", "why"), REFUSED, ids=[json.dumps(form)[:60] for form, _, _ in REFUSED])
def test_what_is_no_form_is_refused(server: Running, form: dict[str, Any], param: str, why: str) -> None:
    content = json.dumps(CHAT | form)
    answer = server.http.post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"})
    error = check_error(answer, 400)
    assert error["param"] == param
    assert why in error["message"]
    assert "\n" not in error["message"]


# --- calls of tools ---------------------------------------------------------------------------------------------------


def forced(url: str, choice: Any, **options: Any) -> tuple[dict[str, Any], str]:
    answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"tools": TOOLS, "tool_choice": choice} | options)
    assert answer.status_code == 200, answer.text
    (first,) = answer.json()["choices"]
    (call,) = first["message"]["tool_calls"]
    assert not first["message"]["content"]
    return dict(call["function"]), str(first["finish_reason"])


def check_calls(url: str) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "pick"}}):
        called, finish = forced(url, choice)
        assert called["name"] in ("pick", "now")
        assert is_valid(called["arguments"], SCHEMA if called["name"] == "pick" else {"maxProperties": 0})
        assert finish == "tool_calls"
    called, _ = forced(url, {"type": "function", "function": {"name": "now"}})
    assert called == {"name": "now", "arguments": "{}"}


def test_a_model_that_knows_no_calls_can_be_made_to_write_one(server: Running) -> None:
    check_calls(server.url)
    parts = server.client.chat.completions.create(  # type: ignore[call-overload]
        model="reference", **CHAT, tools=TOOLS, tool_choice="required", stream=True
    )
    deltas = [part.choices[0].delta for part in parts if part.choices]
    assert not any(delta.content for delta in deltas)
    (call,) = [call for delta in deltas for call in delta.tool_calls or []]
    assert call.index == 0
    assert call.function.name in ("pick", "now")


def test_a_call_that_is_cut_off_comes_as_it_was_written(server: Running) -> None:
    answer = server.post("/v1/chat/completions", **CHAT | {"tools": TOOLS, "tool_choice": "required", "max_tokens": 3})
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("{")


def knows_calls(tokenizer: Any) -> Any:
    """A tokenizer of a model that writes calls as JSON between marks."""
    return TokenizerWrapper(
        tokenizer._tokenizer,
        eos_token_ids=tokenizer.eos_token_ids,
        tool_call_start="<tool_call>",
        tool_call_end="</tool_call>",
        tool_parser=json_tools.parse_tool_call,
    )


def test_a_model_that_knows_calls_writes_its_own() -> None:
    with running(change=knows_calls) as server:
        check_calls(server.url)


def test_where_tools_are_free_an_answer_has_its_form_or_is_a_call(reference: Any) -> None:
    tokenizer = knows_calls(reference[1])
    made, rules = output.Grammars(tokenizer, UnknownFields()), RequestRules()
    mark = tokenizer.tool_call_start_tokens[0]

    def may_call(**options: Any) -> bool:
        request = chats(CHAT | {"response_format": STRICT} | options, rules).request
        grammar = asyncio.run(made.compile(request.constraint, request.constraint_field))
        assert grammar is not None
        processor = grammar.processor(2, LeadIn.after(tokenizer, [1, 2], request.may_call))
        return bool(processor(mx.array([1, 2]), mx.zeros((1, 4096)))[0, mark] == 0)

    assert may_call(tools=TOOLS)
    assert not may_call()
    assert not may_call(tools=TOOLS, tool_choice="none")


def test_schemas_that_are_not_enforced_to_the_letter_are_for_servers_that_are_not_strict(reference: Any) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    strict = {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}

    def ask(form: Any, refuses: bool) -> Any:
        made = output.Grammars(reference[1], UnknownFields(refuses))
        request = chats(CHAT | {"response_format": form}, RequestRules()).request
        return asyncio.run(made.compile(request.constraint, request.constraint_field))

    assert ask(form, False) is not None
    for refused in ((form, True), (strict, False), (strict, True)):
        with pytest.raises(ApiError, match="uniqueItems"):
            ask(*refused)


# --- together with all else -------------------------------------------------------------------------------------------


def test_stop_strings_end_a_form_where_they_stand(server: Running) -> None:
    whole = server.complete("x = ", response_format=STRICT, max_tokens=100)
    assert server.complete("x = ", response_format=STRICT, max_tokens=100, stop='",') == whole.split('",')[0]


def test_what_was_read_before_does_not_matter() -> None:
    with running(prompt_memory_bytes=2**26) as server:
        prompt = SOURCE[:600]
        first = server.complete(prompt, response_format=STRICT, max_tokens=100, seed=4, temperature=1)
        server.wait_until_kept()
        answer = server.post(prompt=prompt, response_format=STRICT, max_tokens=100, seed=4, temperature=1).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert answer["choices"][0]["text"] == first


@pytest.mark.parametrize("draft", [False, True])
def test_a_grammar_that_grows_too_large_ends_its_request_alone(draft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MASK_ITEMS", 100)
    grammar = 'start: "a" b\nb: "x" | b b'  # the more there is, the more ways there are to read it
    with running(draft=draft) as server:
        alone = server.complete("import ", max_tokens=40)
        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(server.complete, "import ", max_tokens=40)
            bias = {str(server.worker.default.models.tokenizer.eos_token_id): -100}
            answer = server.post(prompt="x = ", grammar=grammar, max_tokens=100, logit_bias=bias)
            assert "Too many items" in check_error(answer, 400)["message"]
            assert other.result() == alone
        parts = server.post(prompt="x = ", grammar=grammar, max_tokens=100, logit_bias=bias, stream=True).text
        assert "Too many items" in parts
        assert parts.endswith("data: [DONE]\n\n")
        server.wait_until_empty()


def test_a_grammar_that_takes_long_holds_up_nobody(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    going_on, source_now = threading.Event(), compiled.grammar_source

    def slow(*arguments: Any) -> str:
        assert going_on.wait(20)
        return source_now(*arguments)

    monkeypatch.setattr(compiled, "grammar_source", slow)
    monkeypatch.setattr(output, "COMPILE_SECONDS", 0.5)
    try:
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda text: server.post(prompt="x", regex=text), ("abc", "abd")))
        assert sorted(answer.status_code for answer in answers) == [400, 429]
        assert server.complete("import ", max_tokens=3)
    finally:
        going_on.set()


# --- at random --------------------------------------------------------------------------------------------------------


def check_schemas(url: str, schemas: list[dict[str, Any]]) -> None:
    """Every answer to one of these schemas follows it, drawn at the model's own probabilities."""

    async def answers() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            bodies = [
                {"prompt": "x = ", "json_schema": schema, "temperature": 1, "seed": seed, "max_tokens": 1500}
                for seed, schema in enumerate(schemas)
            ]
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    for schema, answer in zip(schemas, asyncio.run(answers()), strict=True):
        assert answer.status_code == 200, (schema, answer.text)
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "stop", (schema, choice)
        assert is_valid(choice["text"], schema), (schema, choice["text"])


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["none", "draft model", "suffix"])
def test_answers_to_schemas_at_random_follow_them(drafts: str) -> None:
    chance = random.Random(11)
    with running(
        draft=drafts == "draft model", drafting=DraftSettings("suffix") if drafts == "suffix" else None
    ) as server:
        check_schemas(server.url, [random_schema(chance, 2) for _ in range(8)])


@pytest.mark.slow
@pytest.mark.parametrize(("drafts", "parts"), [("none", 10), ("draft model", 4), ("suffix", 4)])
def test_answers_to_many_schemas_at_random_follow_them(drafts: str, parts: int) -> None:
    chance = random.Random(7)
    with running(
        draft=drafts == "draft model", drafting=DraftSettings("suffix") if drafts == "suffix" else None
    ) as server:
        for _ in range(parts):
            check_schemas(server.url, [random_schema(chance) for _ in range(50)])
