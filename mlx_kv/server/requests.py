"""What a client may ask for: OpenAI's fields, checked one by one.

Decides what is honoured, what is ignored because it changes no token, and what is refused. A field that cannot be
honoured is an error, never dropped in silence. Knows nothing about models, tokens or HTTP beyond status codes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Never

MOST_STOPS = 16
MOST_TOKENS = 1 << 24
# They change no token, so nothing is lost when they are not looked at.
IGNORED = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
}
COMMON = {"max_tokens", "model", "seed", "stop", "stream", "stream_options", "temperature", "top_p"}
FOR_COMPLETIONS = {"prompt"}
FOR_CHAT = {"chat_template_kwargs", "max_completion_tokens", "messages", "tool_choice", "tools"}
# Not supported; these values of them say the same as nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0, 0.0),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (0, 0.0, 1, 1.0),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "top_k": (0, -1),
    "top_logprobs": (0,),
}


ROLES = ("assistant", "developer", "function", "system", "tool", "user")
# What a message of the assistant may say instead of content.
INSTEAD = ("reasoning", "reasoning_content", "tool_calls")
# Arguments of apply_chat_template that are not for the template, or that the server sets itself.
NOT_FOR_TEMPLATES = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}


class ApiError(Exception):
    """An answer that is an OpenAI-style error object."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers or {}
        # They may quote what a client sent, of which not everything is Unicode that can be sent back.
        self.message, self.param = _sendable(message), None if param is None else _sendable(param)

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class CompletionRequest:
    """One request, checked.

    Attributes:
        prompt: a text or token ids; None for a chat.
        messages, tools, template: of a chat; template are arguments for the chat template.
        max_tokens: None leaves it to the server.
        temperature: 0 is greedy.
        stops: strings at which the answer ends.
    """

    model: str | None = None
    prompt: str | tuple[int, ...] | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stops: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False

    @property
    def chat(self) -> bool:
        return self.prompt is None


def read_json(raw: bytes) -> Any:
    """JSON as its standard has it, with finite numbers: Python's own takes NaN, and 1e400 for infinity.

    Raises:
        ValueError: it is no JSON, has a number that no float can hold, or a name twice, one of which would be dropped.
        RecursionError: it is nested too deeply.
    """

    def constant(text: str) -> Never:
        raise ValueError(f"{text} is no number there")

    def finite(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"{text[:40]} is too large a number")
        return number

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{max(names, key=names.count)[:80]!r} is there twice: send it once")
        return made

    return json.loads(raw, parse_constant=constant, parse_float=finite, object_pairs_hook=once)


def parse(body: Any, chat: bool, temperature: float) -> CompletionRequest:
    """A request from the JSON of its body.

    Args:
        temperature: where it does not say.

    Raises:
        ApiError: 400, for what it lacks, or what cannot be honoured.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {_kind(body)}: send an object")
    told = {name: value for name, value in body.items() if value is not None}
    known = IGNORED | NEUTRAL.keys() | COMMON | (FOR_CHAT if chat else FOR_COMPLETIONS)
    for name in sorted(told.keys() - known):
        raise ApiError(400, f"unknown field {name[:80]!r}: leave it out", name[:80], "unknown_parameter")
    for name, neutral in NEUTRAL.items():
        if name in told and not any(type(told[name]) is type(value) and told[name] == value for value in neutral):
            raise ApiError(400, f"{name} is not supported by this server: leave it out", name, "unsupported_parameter")
    limits = [_integer(told, name, 1, MOST_TOKENS) for name in ("max_completion_tokens", "max_tokens")]
    stream = _boolean(told, "stream")
    stream_options = _get(told, "stream_options", dict, {})
    if stream_options and not stream:
        raise ApiError(400, "stream_options is only for stream=true: leave it out", "stream_options")
    seed = _integer(told, "seed", -(2**63), 2**64 - 1)
    asked: dict[str, Any] = {
        "model": _get(told, "model", str, None),
        "max_tokens": next((limit for limit in limits if limit is not None), None),
        "temperature": _number(told, "temperature", 0, 2, temperature),
        "top_p": _number(told, "top_p", 0, 1, 1.0),
        "seed": None if seed is None else seed % 2**64,
        "stops": _stops(told),
        "stream": stream,
        "include_usage": _boolean(stream_options, "include_usage"),
    }
    asked |= _chat(told) if chat else {"prompt": _prompt(told)}
    return CompletionRequest(**asked)


def _prompt(told: dict[str, Any]) -> str | tuple[int, ...]:
    prompt = told.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str):
        return _text(prompt, "prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return tuple(prompt)
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        raise ApiError(400, f"got {len(prompt)} prompts: send one in each request, they are batched here", "prompt")
    raise ApiError(400, "prompt is missing or neither a text nor a list of token ids", "prompt")


def _chat(told: dict[str, Any]) -> dict[str, Any]:
    messages = _get(told, "messages", list, [])
    if not messages:
        raise ApiError(400, "messages is missing or empty: send at least one", "messages")
    for index, message in enumerate(messages):
        _message(message, f"messages[{index}]")
    tools = _get(told, "tools", list, [])
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"tools[{index}] is no object with a function that has a name", "tools")
    choice = told.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise ApiError(400, "tool_choice can be auto or none: a call cannot be forced here", "tool_choice")
    template = _get(told, "chat_template_kwargs", dict, {})
    if taken := template.keys() & NOT_FOR_TEMPLATES:
        raise ApiError(400, f"chat_template_kwargs cannot set {min(taken)}", "chat_template_kwargs")
    return {"messages": messages, "tools": [] if choice == "none" else tools, "template": template}


def _message(message: Any, where: str) -> None:
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
        _text(part["text"], where)
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise ApiError(400, f"{where}.tool_calls is a JSON {_kind(calls)}: send an array", f"{where}.tool_calls")
    for index, call in enumerate(calls or []):
        _tool_call(call, f"{where}.tool_calls[{index}]")


def _tool_call(call: Any, where: str) -> None:
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
        raise ApiError(400, f"{where} is a JSON {_kind(arguments)}: send an object", where)


def _stops(told: dict[str, Any]) -> tuple[str, ...]:
    stops = told.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ApiError(400, "stop is neither a text nor a list of texts, or one is empty", "stop")
    if len(stops) > MOST_STOPS:
        raise ApiError(400, f"got {len(stops)} stop strings: send at most {MOST_STOPS}", "stop")
    return tuple(_text(stop, "stop") for stop in stops)


def _sendable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _text(value: str, param: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeError:
        raise ApiError(400, f"{param} is not valid Unicode: it has half of a surrogate pair", param) from None
    return value


def _get(told: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = told.get(name, default)
    if value is not default and not isinstance(value, kind):
        raise ApiError(400, f"{name} is a JSON {_kind(value)}: send {_NAMES[kind]}", name)
    return value


def _boolean(told: dict[str, Any], name: str) -> bool:
    return bool(_get(told, name, bool, False))


def _integer(told: dict[str, Any], name: str, least: int, most: int) -> int | None:
    value = told.get(name)
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise ApiError(400, f"{name} is no whole number from {least} to {most}", name)
    return value


def _number(told: dict[str, Any], name: str, least: float, most: float, default: float) -> float:
    value = told.get(name, default)
    if type(value) not in (int, float) or not least <= value <= most:
        raise ApiError(400, f"{name} is no number from {least} to {most}", name)
    return float(value)


_NAMES = {dict: "an object", list: "an array", str: "a string", bool: "true or false"}


def _kind(value: Any) -> str:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")
