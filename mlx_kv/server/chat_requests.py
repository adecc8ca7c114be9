"""What only chats have: messages, calls of tools, arguments of the chat template, checked one by one.

Decides which messages and tools are refused before a template sees them. Knows nothing about tokenizers.
"""

from __future__ import annotations

import json
from typing import Any

from mlx_kv.generation.encoding import NOT_FOR_TEMPLATES
from mlx_kv.server.constraint_fields import forced_call
from mlx_kv.server.errors import ApiError
from mlx_kv.server.fields import boolean, json_kind, typed, unicode

ROLES = ("assistant", "developer", "function", "system", "tool", "user")
# What a message of the assistant may say instead of content.
INSTEAD = ("reasoning", "reasoning_content", "tool_calls")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def chat_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """What only chats have of a `CompletionRequest`.

    Raises:
        ApiError: 400, for what is no chat, or cannot be honoured.
    """
    messages = typed(fields, "messages", list, [])
    if not messages:
        raise ApiError(400, "messages is missing or empty: send at least one", "messages")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    tools = typed(fields, "tools", list, [])
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"tools[{index}] is no object with a function that has a name", "tools")
        if not function["name"]:
            raise ApiError(400, f"tools[{index}] has an empty name: send the name of a function", "tools")
    choice = fields.get("tool_choice", "auto")
    forced = forced_call(tools, choice)
    template = typed(fields, "chat_template_kwargs", dict, {})
    if taken := template.keys() & (NOT_FOR_TEMPLATES | {"tools"}):
        raise ApiError(400, f"chat_template_kwargs cannot set {min(taken)}", "chat_template_kwargs")
    effort = typed(fields, "reasoning_effort", str, None)
    if effort is not None and effort not in EFFORTS:
        raise ApiError(400, f"reasoning_effort can be one of {', '.join(EFFORTS)}", "reasoning_effort")
    thinks = typed(fields, "enable_thinking", bool, None if effort != "none" else False)
    hints: dict[str, Any] = {} if thinks is None else {"enable_thinking": thinks}
    hints |= {} if effort in (None, "none") else {"reasoning_effort": effort}
    continues = boolean(fields, "continue_final_message")
    if continues and (messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls")):
        raise ApiError(
            400, "continue_final_message wants a last message of the assistant without tool calls",
            "continue_final_message",
        )  # fmt: skip
    roles = typed(fields, "role_mapping", dict, {})
    for role, words in roles.items():
        if not isinstance(words, str):
            raise ApiError(
                400, f"role_mapping has a JSON {json_kind(words)} for {role[:80]!r}: send texts", "role_mapping"
            )
        unicode(words, "role_mapping")
    one_call = not typed(fields, "parallel_tool_calls", bool, True)
    shown = [] if choice == "none" else tools
    checked = {
        "messages": messages,
        "tools": shown,
        "template": template,
        "hints": hints,
        "roles": roles,
        "one_call": one_call,
        "continues": continues,
    }
    return checked if forced is None else checked | {"constraint": forced, "constraint_field": "tools"}


def _check_message(message: Any, where: str) -> None:
    """Raises ApiError for what is no message of a chat."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where} is no object with a role", where)
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise ApiError(400, f"{where} has the role {role[:80]!r}: choose one of {', '.join(ROLES)}", f"{where}.role")
    if content is None or content == []:
        if role != "assistant" or not any(message.get(name) for name in INSTEAD):
            raise ApiError(400, f"{where} has no content: send a text", f"{where}.content")
        content = ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(400, f"the content of {where} is not text: only text is supported", where)
        unicode(part["text"], where)
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise ApiError(400, f"{where}.tool_calls is a JSON {json_kind(calls)}: send an array", f"{where}.tool_calls")
    for index, call in enumerate(calls or []):
        _check_tool_call(call, f"{where}.tool_calls[{index}]")


def _check_tool_call(call: Any, where: str) -> None:
    """Raises ApiError for what is no call of a function by its name with arguments."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ApiError(400, f"{where} is no object with a function", f"{where}.function")
    if not isinstance(function.get("name"), str):
        raise ApiError(400, f"{where}.function has no name", f"{where}.function.name")
    where, arguments = f"{where}.function.arguments", function.get("arguments")
    if arguments is None:
        raise ApiError(
            400, f'{where} is missing: send them as a JSON object in a string, "{{}}" if there are none', where
        )
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")  # nothing is what some clients send for no arguments
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"{where} is no JSON: {error}"[:300], where) from None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{where} is a JSON {json_kind(arguments)}: send an object", where)
