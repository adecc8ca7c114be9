"""Requests that are none, or nearly ones, of every endpoint: an answer, or an error that says what is wrong."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from effort import THOROUGH
from reasoning_server import changed_tokenizer
from serving import Running, running

from mlx_kv.server.api import Limits

ODD: list[Any] = [
    None, True, -1, 0, 1.5, 1e308, 2**80, "", "x", "\ud800", "\0", [], {}, [[]], [None], [7], {"a": [1]}, "{", "[" * 60,
    {"type": "text"}, [{"type": "text"}], {"type": "function", "name": "f"}, "auto", float("nan"),
]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, "logit_bias": {"5": 1.0}, "stop": ["a"],
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "xtc_probability": 0.1, "id_slot": 1,
    "cache": {"budget": 64, "bits": 8}, "regex": "a+", "stream": False, "stream_options": {"include_usage": True},
}  # fmt: skip
CHAT: dict[str, Any] = {
    "model": "reference",
    "max_tokens": 2,
    "messages": [
        {"role": "system", "content": "A"},
        {"role": "user", "content": [{"type": "text", "text": "look"}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": "no"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "logprobs": True, "top_logprobs": 2, "n": 1, "chat_template_kwargs": {"a": 1}, "parallel_tool_calls": False,
    "reasoning_effort": "low", "role_mapping": {"user": "U"}, "enable_thinking": False, "continue_final_message": False,
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "reference", "prompt": ["import", "x"], "max_tokens": 2, "echo": True, "logprobs": 2, "n": 1,
        "suffix": "", "best_of": 1, **SAMPLING,
    },
    "/v1/chat/completions": CHAT | SAMPLING,
    "/v1/responses": {
        "model": "reference", "instructions": "A", "max_output_tokens": 2, "store": True,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "no"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "look"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"], "top_logprobs": 2,
        "previous_response_id": "resp_1", **SAMPLING,
    },
    "/v1/messages": {
        "model": "reference", "max_tokens": 2, "system": [{"type": "text", "text": "A"}],
        "messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "look", "input": {"at": "x"}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "no"}]},
        ],
        "tools": [{"name": "look", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 9}, "stop_sequences": ["a"],
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}, **SAMPLING,
    },
    "/v1/embeddings": {"model": "reference", "input": ["x"]},
}  # fmt: skip
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]
NEEDED = {"filename", "input", "max_tokens", "messages", "prompt"}
ODD_PATHS = [
    "/v1/models/%00", "/v1/models/" + "x" * 3000, "/v1/responses/x", "/v1/responses/%2e%2e", "/slots/-1?action=save",
    "/slots/0", "/slots/0?action=", "/v1/messages/x", "/v1/", "//", "/v1/chat/completions/", "/slots?x=%ff", "/ready?",
]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container within a JSON value, with each of its keys or indexes."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def garbled(body: dict[str, Any], chance: random.Random) -> bytes:
    """A body, a few places of which are something else, or are not there."""
    kind = chance.randrange(12)
    if kind == 0:
        return chance.randbytes(chance.randrange(200))
    if kind == 1:
        return json.dumps(chance.choice(ODD)).encode()
    changed = copy.deepcopy(body)
    for name in list(changed):
        if chance.random() < (0.05 if name in NEEDED else 0.8):
            del changed[name]
    for _ in range(chance.choice([0, 1, 1, 2])):
        found = list(places(changed)) or [(changed, "x")]
        where, key = chance.choice(found)
        if chance.random() < 0.25 and key in where:
            del where[key]
        else:
            where[key] = copy.deepcopy(chance.choice(ODD))
    return json.dumps(changed).encode()


@pytest.fixture(scope="module")
def every() -> Iterator[Running]:
    """A server of which everything can be asked."""
    limits = Limits(max_tokens=2, prompt_tokens=400)
    with running(limits=limits, prompt_memory_bytes=2**24, change=changed_tokenizer, max_batch_size=2) as one:
        yield one


@pytest.mark.slow
def test_no_request_is_a_failure_of_the_server(every: Running) -> None:
    chance, seen, before = random.Random(0), Counter[tuple[str, int]](), every.complete("import", 5)
    with httpx.Client(base_url=every.url, headers={"Content-Type": "application/json"}, timeout=60) as client:
        for index in range(1000 if THOROUGH else 350):
            if index % 20 == 19:
                method = chance.choice(["GET", "POST", "DELETE", "PUT", "HEAD"])
                answer = client.request(method, chance.choice(ODD_PATHS))
                assert answer.status_code < 500, (index, answer.request.url)
                continue
            path = chance.choice(list(BODIES))
            body = garbled(BODIES[path], chance)
            answer = client.post(path, content=body)
            seen[path, answer.status_code] += 1
            assert answer.status_code < 500, (index, path, body, answer.text)
            if answer.status_code >= 400:
                told = answer.json()
                assert told["error"]["message"], (index, path, body)
                assert (told.get("type") == "error") == path.startswith("/v1/messages")
            elif b"data: " in answer.content[:300]:
                assert b"see its log" not in answer.content
                assert b'"error": {' not in answer.content, (index, path, body, answer.text)
    every.wait_until_empty()
    assert every.complete("import", 5) == before
    assert every.metrics.total("engine_failures") == 0
    assert all(seen[path, 200] and seen[path, 400] for path in BODIES if "embed" not in path and "slots" not in path), (
        seen
    )
