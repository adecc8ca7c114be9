"""Items of OpenAI's responses, as messages of a chat.

Decides which items one message of the assistant is made of: what it thought, said and called before anybody else spoke.
Knows nothing about other fields of a request.
"""

from __future__ import annotations

from typing import Any

from mlx_kv.server.dialects.translation import text_field, text_of
from mlx_kv.server.errors import ApiError
from mlx_kv.server.fields import json_kind, unicode

TEXTS = {"input_text", "output_text", "text", "refusal"}


def as_messages(given: Any) -> list[dict[str, Any]]:
    """The messages that an input is.

    Raises:
        ApiError: an item that there is no message for.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": unicode(given, "input")}]
    if not isinstance(given, list) or not given:
        raise ApiError(400, "input is missing or empty: send a text, or items", "input")
    said: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise ApiError(400, f"{where} is a JSON {json_kind(item)}: send an object", where)
        _add(item, where, said)
    return said


def _add(item: dict[str, Any], where: str, said: list[dict[str, Any]]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        content = text_of(_with_texts(item.get("content")), TEXTS, f"{where}.content")
        role = item.get("role")
        if role == "assistant" and said and said[-1]["role"] == "assistant" and "tool_calls" not in said[-1]:
            said[-1]["content"] += content
        else:
            said.append({"role": role, "content": content})
    elif kind == "reasoning":
        _assistant(said)["reasoning"] = _thought(item, where)
    elif kind == "function_call":
        function = {"name": text_field(item, "name", where), "arguments": text_field(item, "arguments", where)}
        call = {"id": text_field(item, "call_id", where), "type": "function", "function": function}
        _assistant(said).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = text_of(item.get("output"), TEXTS, f"{where}.output")
        said.append({"role": "tool", "tool_call_id": text_field(item, "call_id", where), "content": output})
    else:
        raise ApiError(400, f"{where} is of the type {str(kind)[:80]!r}: only messages, reasoning, function_call and "
                       "function_call_output are supported", where)  # fmt: skip


def _with_texts(content: Any) -> Any:
    """The same, where a refusal is a text."""
    if not isinstance(content, list):
        return content
    return [part | {"text": part["refusal"]} if _refuses(part) else part for part in content]


def _refuses(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "refusal" and "refusal" in part


def _assistant(said: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of the assistant that is being put together."""
    if not said or said[-1]["role"] != "assistant":
        said.append({"role": "assistant", "content": ""})
    return said[-1]


def _thought(item: dict[str, Any], where: str) -> str:
    content, summary = item.get("content"), item.get("summary")
    parts = content or summary or []
    return text_of(parts, {"reasoning_text", "summary_text"}, f"{where}.{'content' if content else 'summary'}")
