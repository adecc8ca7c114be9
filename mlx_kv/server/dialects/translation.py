"""What requests of other APIs have in common: they become one of a chat, and its errors speak of their fields.

Decides which fields pass as they are, so that what a chat can be asked for can be asked for here. Knows nothing about
any one API.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mlx_kv.server.errors import ApiError
from mlx_kv.server.fields import json_kind, unicode
from mlx_kv.server.requests import CompletionRequest, RequestRules, parse

# Fields of chats that other APIs have under other names, or not at all.
OF_CHATS = {
    "best_of",
    "function_call",
    "functions",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "modalities",
    "n",
    "parallel_tool_calls",
    "reasoning_effort",
    "response_format",
    "role_mapping",
    "stream_options",
    "tool_choice",
    "tools",
}


def given_fields(body: Any) -> dict[str, Any]:
    """The fields of a body that are there; null is none."""
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {json_kind(body)}: send an object")
    return {name: value for name, value in body.items() if value is not None}


def as_chat(
    fields: Mapping[str, Any],
    own: Collection[str],
    chat: Mapping[str, Any],
    names: Mapping[str, str],
    rules: RequestRules,
) -> CompletionRequest:
    """The request of a chat that says the same.

    Args:
        own: fields of the API, which `chat` has in a chat's terms; others pass as they are.
        names: of fields of the chat, those that the API has for them.

    Raises:
        ApiError: what a chat refuses, in the words of the API.
    """
    rules.unknown.check(fields.keys() & (OF_CHATS - set(own)))
    passed = {name: value for name, value in fields.items() if name not in own and name not in OF_CHATS}
    try:
        return parse(passed | {name: value for name, value in chat.items() if value is not None}, True, rules)
    except ApiError as error:
        raise _renamed(error, names) from None


def _renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    message, param = error.message, error.param
    for name, shown in names.items():
        message = message.replace(name, shown)
        param = param and param.replace(name, shown)
    return ApiError(error.status, message, param, error.code, error.headers)


def text_of(content: Any, kinds: Collection[str], where: str) -> str:
    """A content that is a text, or a list of parts that have one.

    Args:
        kinds: what such parts are called.
    """
    parts = [{"type": min(kinds), "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ApiError(400, f"{where} is a JSON {json_kind(content)}: send a text, or a list of parts", where)
    texts = []
    for index, part in enumerate(parts):
        # JSON's arrays and objects are in no set.
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where}[{index}] is not text: only text is supported", f"{where}[{index}]")
        texts.append(unicode(part["text"], where))
    return "".join(texts)


def text_field(given: Mapping[str, Any], name: str, where: str) -> str:
    """A field of an object within a request, which has to be a text."""
    value = given.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{where}.{name} is a JSON {json_kind(value)}: send a string", f"{where}.{name}")
    return unicode(value, f"{where}.{name}")


def object_list(fields: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A field that is a list of objects; nothing where it is missing."""
    value = fields.get(name, [])
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ApiError(400, f"{name} is no array of objects", name)
    return value
