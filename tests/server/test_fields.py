"""Models of request bodies, without a server: their errors, the values that they accept, and what they pass on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from mlx_kv.generation.grammar import regex
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.server.dialects.completions import ChatBody, CompletionBody, chats, completions
from mlx_kv.server.dialects.messages import MessagesBody, messages
from mlx_kv.server.dialects.responses import Conversations, ResponseBody, ResponsesDialect
from mlx_kv.server.json_http import ApiError
from mlx_kv.server.requests import CacheRequest, CompletionRequest, RequestRules
from mlx_kv.settings import settings_of

USER = {"role": "user", "content": "x"}
Dialect = Callable[[Any, RequestRules], Any]
responses = ResponsesDialect(Conversations())
LEAST: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "completions": (completions, {"prompt": "x"}),
    "chat": (chats, {"messages": [USER]}),
    "responses": (responses, {"input": "x"}),
    "messages": (messages, {"messages": [USER], "max_tokens": 9}),
}


def refusal(api: str, **fields: Any) -> ApiError:
    dialect, least = LEAST[api]
    with pytest.raises(ApiError) as error:
        dialect(least | fields, RequestRules())
    assert error.value.status == 400
    assert "\n" not in error.value.message
    return error.value


ERRORS: list[tuple[str, dict[str, Any], str, str]] = [
    ("completions", {"prompt": None}, "prompt", "prompt is missing: send a text, token ids, or up to 1,024 of these"),
    ("completions", {"temperature": "hot"}, "temperature", "temperature is a JSON string: send a number"),
    ("completions", {"temperature": 3}, "temperature", "temperature is 3: send at most 2"),
    ("completions", {"max_tokens": 0}, "max_tokens", "max_tokens is 0: send at least 1"),
    ("completions", {"max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5: send a whole number"),
    ("completions", {"seed": 10**30}, "seed", f"seed is {10**30}: send at most 18,446,744,073,709,551,615"),
    ("completions", {"temperature": 10**400}, "temperature", f"temperature is 1{'0' * 39}: send a number"),
    ("completions", {"stop": ["a", ""]}, "stop", "stop[1] is empty: send at most 16 texts that are not empty"),
    ("completions", {"logprobs": 21}, "logprobs", "logprobs is 21: send a whole number from 0 to 20, or a boolean"),
    ("completions", {"cache": {"slots": 1}}, "cache.slots", "cache.slots is unknown: leave it out"),
    ("completions", {"cache": {"keep": 0}}, "cache.keep", "cache.keep is 0: send true or false"),
    ("completions", {"repetition_penalty": 0.001}, "repetition_penalty", "is 0.001: send 0, or at least 0.01"),
    ("chat", {"stream_options": {"include_usage": False}}, "stream_options", "only for stream=true: leave it out"),
    ("chat", {"messages": [{"role": 1}]}, "messages[0]", "messages[0] has no role: send one"),
    ("chat", {"messages": [USER, 1]}, "messages[1]", "messages[1] is 1: send an object"),
    ("chat", {"reasoning_effort": "hard"}, "reasoning_effort", "is 'hard': send one of none, minimal, low, medium"),
    ("chat", {"tools": [{"function": {"name": ""}}]}, "tools", "tools[0].function.name is empty: send a text"),
    ("chat", {"tools": [{"function": {"name": "\ud800"}}]}, "tools", "tools[0].function.name is not valid Unicode"),
    ("responses", {"instructions": "a", "input": [USER, {"role": "x"}]}, "input[1].role", "role is 'x': send one"),
    ("responses", {"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "call_id is missing"),
    ("responses", {"reasoning": {"effort": 1}}, "reasoning.effort", "reasoning.effort is 1: send one of none"),
    ("responses", {"text": {"format": 1}}, "text.format", "text.format is not an object with a type"),
    ("messages", {"messages": [USER | {"content": [{"type": "text"}]}]}, "messages[0].content[0].text", "is missing"),
    ("messages", {"temperature": 1.5}, "temperature", "temperature is 1.5: send at most 1"),
]  # fmt: skip


@pytest.mark.parametrize(("api", "fields", "param", "message"), ERRORS, ids=[f"{each[0]} {each[3]}" for each in ERRORS])
def test_an_error_names_the_place_the_problem_and_the_fix(
    api: str, fields: dict[str, Any], param: str, message: str
) -> None:
    error = refusal(api, **fields)
    assert error.param == param
    assert message in error.message


@pytest.mark.parametrize("api", LEAST)
def test_sampling_fields_have_the_served_bounds_of_their_settings(api: str) -> None:
    dialect, least = LEAST[api]
    for name, setting in settings_of(SamplingSettings).items():
        if setting.served is None:
            continue
        low, high = setting.served
        high = 1 if (api, name) == ("messages", "temperature") else high
        for value in (low, high):
            request = dialect(least | {name: value}, RequestRules()).request
            used = {"top_k": max(value, 0), "seed": None if value < 0 else value}.get(name, value)
            assert getattr(request.sampling, name) == used
        step = 1 if setting.kind is int else 1e-9 * max(1, abs(high))
        for value in (low - step, high + step, True, "1", [], math.inf):
            assert refusal(api, **{name: value}).param == name


@pytest.mark.parametrize("api", LEAST)
def test_null_is_the_same_as_a_field_that_is_left_out(api: str) -> None:
    dialect, least = LEAST[api]
    models: dict[str, type[BaseModel]] = {
        "completions": CompletionBody, "chat": ChatBody, "responses": ResponseBody, "messages": MessagesBody
    }  # fmt: skip
    names = models[api].model_fields.keys() - least.keys()
    assert len(names) > 30
    plain = dialect(least, RequestRules()).request
    assert dialect(least | dict.fromkeys(names), RequestRules()).request == plain
    assert dialect(least | {"cache": {"budget": None, "keep": None, "unknown": None}}, RequestRules()).request == plain


def test_what_is_not_known_of_messages_and_tools_reaches_the_template_as_it_was_sent() -> None:
    """Fields that no model here has; those of tools in the order of the client: templates may print them."""
    sent = [{"name": "n", "content": [{"text": "x", "type": "text"}], "role": "user", "more": [None, {"b": 1, "a": 2}]}]
    tools = [{"more": {"b": 1, "a": None}, "function": {"strict": None, "parameters": {"z": 1, "a": 2}, "name": "f"}}]
    request = chats({"messages": sent, "tools": tools}, RequestRules()).request
    assert request.messages == [sent[0] | {"content": "x"}]
    assert json.dumps(request.tools) == json.dumps(tools)


SHARED = {"model": "m", "stream": True, "stop": "a", "cache": {"keep": False}, "top_k": -1}
SHARED |= {"seed": 9, "logit_bias": {"5": 1}, "regex": "a+", "response_format": {"type": "text"}}
WANTED: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "stop_strings": ("a",),
    "cache": CacheRequest(keep=False),
    "sampling": SamplingSettings(top_k=0, seed=9, logit_bias={5: 1}),
    "constraint": regex("a+"),
    "constraint_field": "regex",
}


def test_every_field_of_a_completion_is_in_its_request() -> None:
    own = {"prompt": [[1, 2], "x"], "echo": True, "max_tokens": 7, "n": 2, "stream_options": {"include_usage": True}}
    wanted = CompletionRequest(prompts=[[1, 2], "x"], echo=True, max_tokens=7, n=2, include_usage=True, **WANTED)
    assert completions(SHARED | own, RequestRules()).request == wanted
    wanted.echo, wanted.top_logprobs = False, 3
    assert completions(SHARED | own | {"echo": False, "logprobs": 3}, RequestRules()).request == wanted


def test_every_field_of_a_chat_is_in_its_request() -> None:
    begun = {"role": "assistant", "content": "y"}
    tools = [{"function": {"name": "f"}}]
    own = {"messages": [USER, begun], "tools": tools, "max_completion_tokens": 7, "max_tokens": 8, "n": 2}
    own |= {"continue_final_message": True, "parallel_tool_calls": False, "role_mapping": {"user": "U"}}
    own |= {"chat_template_kwargs": {"a": 1}, "reasoning_effort": "low", "enable_thinking": True}
    own |= {"max_thinking_tokens": 5}
    wanted = CompletionRequest(
        messages=[USER, begun],
        tools=tools,
        template={"a": 1},
        hints={"enable_thinking": True, "reasoning_effort": "low"},
        roles={"user": "U"},
        one_call=True,
        continues=True,
        max_tokens=7,
        n=2,
        top_logprobs=2,
        thinking_budget=5,
        effort="low",
        **WANTED,
    )
    assert chats(SHARED | own | {"logprobs": True, "top_logprobs": 2}, RequestRules()).request == wanted
    refused = refusal("chat", tools=tools, tool_choice="required", regex="a+")
    assert (refused.param, refused.message) == ("regex", "tool_choice and regex both constrain the answer: send one")
    forced = chats({"messages": [USER], "tools": tools, "tool_choice": "required"}, RequestRules()).request
    assert (forced.forces_call, forced.may_call, forced.constraint_field) == (True, False, "tools")
    hidden = chats({"messages": [USER], "tools": tools, "tool_choice": "none"}, RequestRules()).request
    assert (hidden.tools, hidden.may_call) == ([], False)
    quiet = chats({"messages": [USER], "max_tokens": 8, "reasoning_effort": "none"}, RequestRules()).request
    assert (quiet.hints, quiet.max_tokens) == ({"enable_thinking": False}, 8)


MANY = 1000
LISTS: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (CompletionBody, {"prompt": [[-1] * MANY]}),
    (CompletionBody, {"prompt": "x", "stop": [1] * MANY}),
    (CompletionBody, {"prompt": "x", "cache": dict.fromkeys(map(str, range(MANY)), 1)}),
    (CompletionBody, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(MANY)), "a")}),
    (ChatBody, {"messages": [1] * MANY}),
    (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [1] * MANY}]}),
    (ChatBody, {"messages": [USER], "tools": [1] * MANY}),
    (ResponseBody, {"input": [1] * MANY}),
    (ResponseBody, {"input": "x", "tools": [1] * MANY}),
    (MessagesBody, {"messages": [1] * MANY, "max_tokens": 1}),
    (MessagesBody, {"messages": [USER | {"content": [{"type": "text"}] * MANY}], "max_tokens": 1}),
    (MessagesBody, {"messages": [USER], "tools": [1] * MANY, "max_tokens": 1}),
]


@pytest.mark.parametrize(("model", "body"), LISTS, ids=[f"{model.__name__} {list(body)[-1]}" for model, body in LISTS])
def test_a_long_list_is_refused_at_its_first_error(model: type[BaseModel], body: dict[str, Any]) -> None:
    """A body of 4 MiB has room for a million wrong elements, and an error of each would take seconds."""
    with pytest.raises(ValidationError) as error:
        model.model_validate(body)
    assert error.value.error_count() <= 2  # one for each alternative of a union
