"""Requests of Anthropic's messages, as those of a chat.

Decides what becomes of their blocks. Knows nothing about answers.
"""

from __future__ import annotations

import json
from typing import Any

from mlx_kv.server.dialects.message_writer import MessageWriter
from mlx_kv.server.dialects.translation import as_chat, given_fields, object_list, text_field, text_of
from mlx_kv.server.errors import ApiError
from mlx_kv.server.fields import boolean, json_kind, number, typed, unicode
from mlx_kv.server.intake import Asked
from mlx_kv.server.requests import CompletionRequest, RequestRules

OWN = {"max_tokens", "messages", "output_config", "stop_sequences", "system", "thinking", "tool_choice", "tools"}
# They change no token, or say only where something is computed.
IGNORED = {"betas", "cache_control", "container", "context_management", "diagnostics", "inference_geo", "speed"}
NAMES = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "stop strings": "stop_sequences",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def messages(body: Any, rules: RequestRules) -> Asked:
    """A `Dialect`: Anthropic's messages."""
    fields = given_fields(body)
    if "max_tokens" not in fields:
        raise ApiError(400, "max_tokens is missing: send how many tokens an answer may have", "max_tokens")
    request = _request(fields, rules)
    return Asked(request, lambda model: MessageWriter(request, model))


def counted(body: Any, rules: RequestRules) -> CompletionRequest:
    """What is counted of Anthropic's messages, for which there is no answer."""
    return _request(given_fields(body), rules)


def _request(fields: dict[str, Any], rules: RequestRules) -> CompletionRequest:
    number(fields, "temperature", 0, 1, 0.0)
    chat: dict[str, Any] = {"messages": _system(fields), "max_completion_tokens": fields.get("max_tokens")}
    said = object_list(fields, "messages")
    if not said:
        raise ApiError(400, "messages is missing or empty: send at least one", "messages")
    for index, message in enumerate(said):
        chat["messages"] += _message(message, f"messages[{index}]")
    chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(object_list(fields, "tools"))]
    if "stop" in fields and "stop_sequences" in fields:
        raise ApiError(400, "stop and stop_sequences both say where an answer ends: send one", "stop")
    if "stop_sequences" in fields:
        chat["stop"] = typed(fields, "stop_sequences", list, [])
    chat |= _tool_choice(fields) | _thinking(fields) | _output(fields)
    continues = said[-1].get("role") == "assistant" and not chat["messages"][-1].get("tool_calls")
    fields = {name: value for name, value in fields.items() if name not in IGNORED}
    return as_chat(fields, OWN, chat | {"continue_final_message": continues}, NAMES, rules)


def _system(fields: dict[str, Any]) -> list[dict[str, Any]]:
    text = text_of(fields.get("system", ""), {"text"}, "system")
    return [{"role": "system", "content": text}] if text else []


def _message(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The messages of a chat that say the same: results of tools are messages of their own there."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(400, f"{where} has the role {str(role)[:80]!r}: send user or assistant", f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": unicode(content, f"{where}.content")}]
    if not isinstance(content, list) or not content:
        raise ApiError(400, f"{where} has no content: send a text, or blocks", f"{where}.content")
    said: dict[str, Any] = {"role": role, "content": "", "reasoning": "", "tool_calls": []}
    results: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        _add_block(block, f"{where}.content[{index}]", said, results)
    said = {name: value for name, value in said.items() if value or name in ("role", "content")}
    return results if results and len(said) == 2 and not said["content"] else [*results, said]


def _add_block(block: Any, where: str, said: dict[str, Any], results: list[dict[str, Any]]) -> None:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        said["content"] += text_of([block], {"text"}, where)
    elif kind == "tool_result" and said["role"] == "user":
        text = text_of(block.get("content", ""), {"text"}, f"{where}.content")
        shown = f"error: {text}" if boolean(block, "is_error") else text
        results.append({"role": "tool", "tool_call_id": text_field(block, "tool_use_id", where), "content": shown})
    elif kind == "tool_use" and said["role"] == "assistant":
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            raise ApiError(400, f"{where}.input is a JSON {json_kind(arguments)}: send an object", f"{where}.input")
        function = {"name": text_field(block, "name", where), "arguments": json.dumps(arguments, ensure_ascii=False)}
        said["tool_calls"].append({"id": text_field(block, "id", where), "type": "function", "function": function})
    elif kind == "thinking" and said["role"] == "assistant":
        said["reasoning"] += text_field(block, "thinking", where)
    elif kind != "redacted_thinking":
        told = f"{where} is a block of the type {str(kind)[:80]!r}, which no message of {said['role']} can have here"
        raise ApiError(400, told, where)


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not isinstance(schema, dict):
        raise ApiError(400, f"{where} has no name and input_schema: only tools that clients run are supported", where)
    function = {"name": name, "description": typed(tool, "description", str, ""), "parameters": schema}
    function |= {"strict": boolean(tool, "strict")} if tool.get("strict") is not None else {}
    return {"type": "function", "function": function}


def _tool_choice(fields: dict[str, Any]) -> dict[str, Any]:
    choice = typed(fields, "tool_choice", dict, {})
    kind = choice.get("type", "auto")
    alone = {"parallel_tool_calls": False} if boolean(choice, "disable_parallel_tool_use") else {}
    if kind == "tool":
        return {
            "tool_choice": {"type": "function", "function": {"name": text_field(choice, "name", "tool_choice")}}
        } | alone
    if not isinstance(kind, str) or kind not in CHOICES:
        raise ApiError(400, "tool_choice.type can be auto, any, tool or none", "tool_choice")
    return alone if kind == "auto" else {"tool_choice": CHOICES[kind]} | alone


def _thinking(fields: dict[str, Any]) -> dict[str, Any]:
    kind = typed(fields, "thinking", dict, {}).get("type")
    if kind not in (None, "enabled", "adaptive", "disabled"):
        raise ApiError(400, "thinking.type can be enabled, adaptive or disabled", "thinking")
    return {} if kind in (None, "adaptive") else {"enable_thinking": kind == "enabled"}


def _output(fields: dict[str, Any]) -> dict[str, Any]:
    settings = typed(fields, "output_config", dict, {})
    wanted, said = settings.get("format"), {}
    if wanted is not None:
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            raise ApiError(400, "output_config.format can be of the type json_schema", "output_config.format")
        said["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": wanted.get("schema"), "strict": wanted.get("strict")},
        }
    return said | {"reasoning_effort": settings.get("effort")}
