"""Requests of OpenAI's responses, as those of a chat.

Decides what becomes of their fields. Knows nothing about answers.
"""

from __future__ import annotations

from typing import Any

from mlx_kv.server.dialects.conversations import Conversations
from mlx_kv.server.dialects.response_items import as_messages
from mlx_kv.server.dialects.response_writer import ResponseWriter
from mlx_kv.server.dialects.translation import as_chat, given_fields, object_list
from mlx_kv.server.errors import ApiError
from mlx_kv.server.fields import boolean, typed
from mlx_kv.server.intake import Asked
from mlx_kv.server.requests import RequestRules

OWN = {
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "parallel_tool_calls",
    "previous_response_id",
    "reasoning",
    "store",
    "stream_options",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
}
# They change no token here.
IGNORED = {"context_management", "max_tool_calls", "prompt_cache_options"}
REFUSED = {"background": (False,), "conversation": (), "moderation": (), "prompt": ()}  # but for these values
NAMES = {"max_completion_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
LOGPROBS = "message.output_text.logprobs"


class ResponsesDialect:
    """A `Dialect`: OpenAI's responses.

    Args:
        conversations: which requests may go on from.
    """

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    def __call__(self, body: Any, rules: RequestRules) -> Asked:
        fields = given_fields(body)
        for name, neutral in REFUSED.items():
            if name in fields and fields[name] not in neutral:
                raise ApiError(400, f"{name} is not supported by this server: leave it out", name,
                               "unsupported_parameter")  # fmt: skip
        if fields.pop("truncation", "disabled") != "disabled":
            rules.unknown.passed_over("truncation", "a conversation that is too long is refused, not cut")
        said = self._messages(fields)
        instructions = typed(fields, "instructions", str, None)
        system = [] if instructions is None else [{"role": "system", "content": instructions}]
        chat: dict[str, Any] = {
            "messages": system + said,
            "max_completion_tokens": fields.get("max_output_tokens"),
            "parallel_tool_calls": fields.get("parallel_tool_calls"),
            "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(object_list(fields, "tools"))],
            "tool_choice": _tool_choice(fields),
            "reasoning_effort": typed(fields, "reasoning", dict, {}).get("effort"),
            "response_format": _format(fields),
        } | _logprobs(fields)
        passed = {name: value for name, value in fields.items() if name not in (*IGNORED, *REFUSED)}
        request = as_chat(passed, OWN, chat, NAMES, rules)
        conversations = self._conversations if typed(fields, "store", bool, True) else None
        return Asked(request, lambda model: ResponseWriter(fields, said, model, conversations))

    def _messages(self, fields: dict[str, Any]) -> list[dict[str, Any]]:
        said, before = as_messages(fields.get("input")), typed(fields, "previous_response_id", str, None)
        return said if before is None else [*self._conversations.find(before, "previous_response_id").messages, *said]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise ApiError(400, f"{where} is no function with a name: only tools that clients run are supported", "tools")
    said = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in said if tool.get(name) is not None}}


def _tool_choice(fields: dict[str, Any]) -> Any:
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(fields: dict[str, Any]) -> Any:
    wanted = typed(fields, "text", dict, {}).get("format")
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return wanted
    said = {name: value for name, value in wanted.items() if name != "type"}
    return {"type": "json_schema", "json_schema": said}


def _logprobs(fields: dict[str, Any]) -> dict[str, Any]:
    included = typed(fields, "include", list, [])
    boolean(typed(fields, "stream_options", dict, {}), "include_obfuscation")
    wanted = LOGPROBS in included or fields.get("top_logprobs", 0) != 0
    return {"logprobs": True, "top_logprobs": fields.get("top_logprobs")} if wanted else {}
