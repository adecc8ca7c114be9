"""A chat as tokens: mlx-lm's chat templates.

Decides what becomes of a chat where the tokenizer has no template: what `mlx_lm.server` makes of it, so that a client
gets the same from both. Knows nothing about HTTP, nor about answers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mlx_lm.server import convert_chat, process_message_content

from mlx_kv.generation.encoding import TemplateError, encode_messages
from mlx_kv.server.errors import ApiError
from mlx_kv.server.requests import CompletionRequest
from mlx_kv.server.unknown_fields import UnknownFields

NOTHING: Mapping[str, Any] = MappingProxyType({})


def encode_chat(
    tokenizer: Any, request: CompletionRequest, unknown: UnknownFields, template: Mapping[str, Any] = NOTHING
) -> list[int]:
    """The messages of a chat, up to where the answer begins.

    Args:
        unknown: what becomes of tools where the model has no way to call them that mlx-lm knows.
        template: settings of the chat template, where the request does not say.

    Raises:
        ApiError: 400, for messages that the template refuses, or tools that are.
    """
    if request.tools and not tokenizer.has_tool_calling and not request.forces_call:
        if unknown.strict:
            raise ApiError(400, "this model cannot call tools: leave them out", "tools", "unsupported_parameter")
        unknown.note(
            "tools", "requests have tools, but this model writes no calls that mlx-lm can parse: it may not call"
        )
    try:
        messages = copy.deepcopy(request.messages)
        for function in (call["function"] for message in messages for call in message.get("tool_calls") or ()):
            function["arguments"] = function["arguments"] or "{}"
        for told in messages:
            _name_reasoning_twice(told)
        process_message_content(messages)
        if not tokenizer.has_chat_template:
            if request.template:
                raise ValueError("this model has no chat template, so it takes no chat_template_kwargs")
            begun = f" {messages.pop()['content']}" if request.continues else ""
            return [int(token) for token in tokenizer.encode(convert_chat(messages, request.roles or None) + begun)]
        settings = {**template, **request.hints, **request.template}
        return encode_messages(tokenizer, messages, request.continues, tools=request.tools or None, **settings)
    except TemplateError as error:
        raise ApiError(400, str(error), "messages") from error
    except Exception as error:  # as mlx-lm's own are, templates are programs of others, and raise what they like
        message = " ".join(f"the chat template refuses these messages: {type(error).__name__}: {error}".split())
        raise ApiError(400, message[:500], "messages") from error


def _name_reasoning_twice(message: dict[str, Any]) -> None:
    """What a model thought: answers have it as `reasoning`, as mlx_lm.server's do, and templates read either name."""
    thought = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(thought, str):
        message["reasoning"] = message["reasoning_content"] = thought
