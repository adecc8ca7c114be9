"""Requests as coding agents send them, in other words, and what the server makes of them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from reasoning_server import CALL
from serving import Running

from mlx_kv.server.dialects.completions import chats
from mlx_kv.server.dialects.messages import messages, token_count_request
from mlx_kv.server.dialects.ollama import OllamaChatBody
from mlx_kv.server.dialects.responses import Conversations, ResponseBody, ResponsesDialect
from mlx_kv.server.json_http import ApiError
from mlx_kv.server.requests import CompletionRequest, RequestRules, UnknownFields

PATCH = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin\\n" /[A-Z].*/'}
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
HEADER = "x-anthropic-billing-header: cc_version=2.0.1; cc_entrypoint=cli; cch=%s;"


def claude_body(marker: str, **more: Any) -> dict[str, Any]:
    """As Claude Code asks at the beginning of a session."""
    return {
        "model": "claude-sonnet-4-5",
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            {"type": "text", "text": HEADER % marker},
            {"type": "text", "text": "You help with code.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Answer briefly."},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<reminder>Read first.</reminder>"},
                    {"type": "text", "text": "What is in cache.py?", "cache_control": {"type": "ephemeral"}},
                ],
            },
            {"role": "system", "content": [{"type": "text", "text": "# Environment"}]},
        ],
        "tools": [
            {"name": "Read", "description": "Reads.", "input_schema": SCHEMA, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
            {"type": "code_execution_20250825", "name": "code_execution"},
        ],
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "someone"},
        "betas": ["interleaved-thinking-2025-05-14"],
        **more,
    }


def test_claude_code_finds_its_prefix() -> None:
    """Its first line changes with each request, and is in no prompt; the tools of Anthropic's servers neither."""
    rules = RequestRules(unknown=UnknownFields(strict=True))
    first, second = (messages(claude_body(marker), rules).request for marker in ("1a", "2b"))
    assert first == second
    assert first.messages == [
        {"role": "system", "content": "You help with code.\nAnswer briefly."},
        {"role": "user", "content": "<reminder>Read first.</reminder>\nWhat is in cache.py?"},
        {"role": "system", "content": "# Environment"},
    ]
    assert [tool["function"]["name"] for tool in first.tools] == ["Read"]
    assert first.hints == {"enable_thinking": True, "reasoning_effort": "high"}
    counted = token_count_request({**claude_body("3c"), "max_tokens": None}, rules)
    assert (counted.messages, counted.tools) == (first.messages, first.tools)
    one = claude_body("1a", system=f"{HEADER % 'x'}\n\nBe brief.")
    assert messages(one, rules).request.messages[0] == {"role": "system", "content": "Be brief."}


def test_its_first_line_can_stay() -> None:
    kept = messages(claude_body("1a"), RequestRules(client_headers=True)).request.messages[0]["content"]
    assert kept == f"{HEADER % '1a'}\nYou help with code.\nAnswer briefly."


def codex_body(*items: dict[str, Any], **more: Any) -> dict[str, Any]:
    """As Codex asks."""
    said = [("developer", "You help."), ("developer", "## Skills"), ("user", "<cwd>/repo</cwd>"), ("user", "Look.")]
    told = [{"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]} for role, text in said]
    return {
        "model": "gpt",
        "stream": True,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "1",
        "client_metadata": {"session_id": "1"},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "reasoning": {"summary": "auto"},
        "tools": [
            {"type": "function", "name": "look", "strict": False, "parameters": SCHEMA},
            {
                "type": "namespace",
                "name": "agents",
                "description": "Agents.",
                "tools": [{"type": "function", "name": "look", "strict": False, "parameters": SCHEMA}],
            },
            {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": PATCH},
            {"type": "custom", "name": "note", "format": {"type": "text"}},
            {"type": "web_search", "external_web_access": False},
            {"type": "image_generation"},
            {"type": "local_shell"},
        ],
        "input": [*told, *items],
        **more,
    }


def codex(*items: dict[str, Any]) -> CompletionRequest:
    dialect = ResponsesDialect(Conversations())
    return dialect(codex_body(*items), RequestRules(unknown=UnknownFields(strict=True))).request  # type: ignore[union-attr]


def test_codex_has_its_tools() -> None:
    request = codex()
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in request.tools}
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert functions == {"look": SCHEMA, "agents__look": SCHEMA, "apply_patch": text, "note": text}
    assert request.tools[2]["function"]["description"].endswith("grammar (lark):\n" + PATCH["definition"])
    assert [message["role"] for message in request.messages] == ["system", "system", "user", "user"]


def test_items_of_all_tools_are_part_of_the_conversation() -> None:
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "id": "rs", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {"type": "function_call", "call_id": "1", "name": "look", "namespace": "agents", "arguments": '{"at":"x"}'},
        {"type": "function_call_output", "call_id": "1", "output": "seen"},
        {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "local_shell_call", "call_id": "3", "status": "completed", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "3", "output": "cache.py"},
        {"type": "tool_search_call", "call_id": "4", "arguments": {"query": "q"}},
        {"type": "tool_search_output", "call_id": "4", "status": "completed", "tools": [{"name": "t"}]},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "compaction", "encrypted_content": "gAAA"},
    ]
    found = codex(*items).messages[4:]
    calls = [call["function"] for message in found for call in message.get("tool_calls", ())]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("agents__look", {"at": "x"}),
        ("apply_patch", {"input": "*** Begin"}),
        ("local_shell", {"command": ["ls"]}),
        ("tool_search", {"query": "q"}),
    ]
    results = {message["tool_call_id"]: message["content"] for message in found if message["role"] == "tool"}
    assert results == {"1": "seen", "2": "done", "3": "cache.py", "4": '{"tools": [{"name": "t"}]}'}
    said = "[{}, not shown: this model reads text]"
    assert found[-1]["content"].split("\n") == [said.format("web search call"), said.format("compaction")]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_back_as_they_were_asked_for(reasoner: Running, says: Any, stream: bool) -> None:
    """Of a namespace by both names, and of a custom tool as its text, which OpenAI's client reads."""
    named = [("agents__look", {"at": "x"}), ("apply_patch", {"input": "*** Begin\nPatch"}), ("note", {"it": 1})]
    says("".join(CALL.replace("look", name).replace('{"at": "cache.py"}', json.dumps(each)) for name, each in named))
    body = codex_body() | {"extra_body": {"client_metadata": {"session_id": "1"}}}
    del body["client_metadata"]
    body |= {"max_output_tokens": 20, "stream": stream, "model": "reference"}
    if stream:
        with reasoner.client.responses.create(**body) as events:
            got = list(events)
        kinds = [event.type for event in got]
        assert kinds.count("response.custom_tool_call_input.done") == 2
        texts = [event.delta for event in got if event.type == "response.custom_tool_call_input.delta"]
        assert texts == ["*** Begin\nPatch", '{"it": 1}']
        assert [event.item.type for event in got if event.type == "response.output_item.added"] == [
            "function_call",
            "custom_tool_call",
            "custom_tool_call",
        ]
        response = got[-1].response
    else:
        response = reasoner.client.responses.create(**body)
    call, patch, other = response.output
    assert (call.type, call.name, call.namespace, json.loads(call.arguments)) == (
        "function_call",
        "look",
        "agents",
        {"at": "x"},
    )
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", "*** Begin\nPatch")
    assert (other.type, other.input) == ("custom_tool_call", '{"it": 1}')
    again = [each.model_dump(exclude_none=True) for each in response.output]
    sent = ResponseBody.parse(codex_body(*again), UnknownFields())
    assert len(sent.input) == 7


@pytest.mark.parametrize(
    ("syntax", "definition", "pattern"),
    [("lark", 'start: "*** " LINE "\\n"\nLINE: /["a-c]{3}/', r'\*\*\* ["a-c]{3}\n'), ("regex", r"[a/]{2}\n\d", None)],
)
def test_the_text_of_a_custom_tool_follows_its_grammar(
    server: Running, syntax: str, definition: str, pattern: str | None
) -> None:
    """Whatever the model would say."""
    made = {"type": "grammar", "syntax": syntax, "definition": definition}
    body = {
        "model": "reference",
        "input": "x",
        "tools": [{"type": "custom", "name": "note", "format": made}],
        "tool_choice": {"type": "custom", "name": "note"},
        "max_output_tokens": 32,
        "temperature": 1,
    }
    for seed in range(3):
        (call,) = server.client.responses.create(**body, extra_body={"seed": seed}).output
        assert (call.type, call.name) == ("custom_tool_call", "note")
        assert re.fullmatch(pattern or definition, call.input)


def test_calls_that_codex_leaves_to_the_model_follow_the_grammars_of_its_tools(reasoner: Running) -> None:
    """Where they begin; a text is free, and so is the form of an answer that has its own."""
    request = codex()
    assert request.constraint is not None
    assert request.constraint.kind == "auto_calls"
    assert not request.forces_call
    functions = {name: (schema, text) for name, schema, _, text in json.loads(request.constraint.text)}
    assert functions["apply_patch"][1] == PATCH["definition"]
    assert functions["look"] == functions["agents__look"] == ({"type": "object"}, "")
    body = {"model": "reference", "input": "x", "temperature": 0, "max_output_tokens": 12}
    told = {"description": f"\n\nIts input follows this grammar (lark):\n{PATCH['definition']}"}  # the same prompt
    said = [
        reasoner.client.responses.create(**body, tools=[{"type": "custom", "name": "note", **more}])
        for more in ({"format": PATCH}, told)
    ]
    assert [each.usage.input_tokens for each in said] == [said[1].usage.input_tokens] * 2
    assert [(item.type, item.content[0].text) for item in said[0].output] == [
        (item.type, item.content[0].text) for item in said[1].output
    ]
    form = {"text": {"format": {"type": "json_object"}}}
    other = ResponsesDialect(Conversations())(codex_body(**form), RequestRules())
    assert other.request.constraint.kind == "json_schema"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("parameters", "answer"),
    [({"properties": {"at": {"type": "string"}}}, "object"), ({"anyOf": [{"type": "object"}]}, None), (None, "object")],
)
def test_calls_that_are_forced_have_objects_for_arguments(parameters: Any, answer: str | None) -> None:
    """Also by a schema that does not say so."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
    constraint = chats(body, RequestRules()).request.constraint
    assert constraint is not None
    ((_, schema, *_),) = json.loads(constraint.text)
    assert schema.get("type") == answer


@pytest.mark.parametrize("seed", [-1, -7])
def test_a_negative_seed_is_a_random_one(seed: int) -> None:
    """In all dialects, as Ollama's clients and others mean it."""
    user = {"role": "user", "content": "x"}
    for request in (
        chats({"messages": [user], "seed": seed}, RequestRules()).request,
        messages({"messages": [user], "max_tokens": 1, "seed": seed}, RequestRules()).request,
    ):
        assert request.sampling.seed is None


def test_details_of_ollamas_clients() -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "think": "max",
        "options": {"num_predict": 2.0, "top_k": 4.0, "seed": -1},
    }
    request = OllamaChatBody.parse(body, UnknownFields(True)).openai_body(UnknownFields(True), True)
    asked = request.completion_request(RequestRules())
    assert (asked.max_tokens, asked.sampling.top_k, asked.sampling.seed) == (2, 4, None)
    assert asked.hints == {"reasoning_effort": "max"}


def test_a_body_without_a_type_is_for_programs(reasoner: Running) -> None:
    """As curl sends it to Ollama; a page of another site could send it without asking."""
    body = json.dumps({"model": "reference", "prompt": "x", "stream": False, "options": {"num_predict": 1}})
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert reasoner.http.post("/api/generate", content=body, headers=form).status_code == 200
    assert reasoner.http.post("/api/generate", content=body).status_code == 200
    own = {"Origin": reasoner.url, **form}
    assert reasoner.http.post("/api/generate", content=body, headers=own).status_code == 415
    assert reasoner.http.post("/v1/completions", content=body, headers=form).status_code == 415


@pytest.mark.parametrize(("role", "kind"), [("user", "tool_use"), ("user", "thinking"), ("assistant", "tool_result")])
def test_blocks_of_another_role_are_refused(role: str, kind: str) -> None:
    body = {"max_tokens": 1, "messages": [{"role": role, "content": [{"type": kind}]}]}
    with pytest.raises(ApiError, match=f"a block of the type '{kind}', which messages of {role} cannot have"):
        messages(body, RequestRules())
