"""What a client may ask for: OpenAI's fields, checked one by one.

Decides what is honoured, what is ignored because it changes no token, and what is refused: a field that is known and
cannot be honoured. One that nobody knows is left to `UnknownFields`. Every API's requests become one of these. Knows
nothing about models, tokens or HTTP beyond status codes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlx_kv.generation.grammar.constraint import Constraint
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.server import sampling_fields
from mlx_kv.server.cache_requests import AS_SERVED, CacheRequest, cache_field
from mlx_kv.server.chat_requests import chat_fields
from mlx_kv.server.constraint_fields import FIELDS, constraint_of
from mlx_kv.server.errors import ApiError
from mlx_kv.server.fields import boolean, integer, json_kind, typed, unicode
from mlx_kv.server.sampling_fields import Answers, answers_of
from mlx_kv.server.unknown_fields import UnknownFields

MOST_STOPS = 16
MOST_PROMPTS = 1024
Prompt = str | tuple[int, ...]
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
COMMON = {"cache", "id_slot", "max_tokens", "model", "stop", "stream", "stream_options", *sampling_fields.FIELDS}
FOR_COMPLETIONS = {"echo", "prompt"}
FOR_CHAT = {
    "chat_template_kwargs",
    "continue_final_message",
    "enable_thinking",
    "max_completion_tokens",
    "messages",
    "parallel_tool_calls",
    "reasoning_effort",
    "role_mapping",
    "tool_choice",
    "tools",
}
# Not supported; these values of them say the same as nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "adapters": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
}


@dataclass(frozen=True)
class CompletionRequest:
    """One request, checked.

    Attributes:
        prompts: texts or token ids, each of which gets answers of its own; none for a chat.
        messages, tools, template: of a chat; template are arguments for the chat template.
        hints: arguments for a chat template, where there is one.
        roles: what comes before messages of each role where a model has no chat template; empty is mlx-lm's.
        continues: whether the answer goes on from the last message, which is the assistant's.
        one_call: whether an answer has one tool call at the most.
        echo: whether an answer begins with its prompt.
        max_tokens: None leaves it to the server.
        wanted: how many answers a prompt gets, and how their tokens are chosen and told.
        slot: in which it is to be shown; None is any.
        stop_strings: strings at which the answer ends.
        cache: how its keys and values are to be kept.
        constraint: what form the answer has; None is any.
        constraint_field: the field that says so.
    """

    model: str | None = None
    prompts: tuple[Prompt, ...] = ()
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    hints: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    one_call: bool = False
    continues: bool = False
    echo: bool = False
    max_tokens: int | None = None
    wanted: Answers = field(default_factory=Answers)
    stop_strings: tuple[str, ...] = ()
    slot: int | None = None
    constraint: Constraint | None = None
    constraint_field: str = ""
    stream: bool = False
    include_usage: bool = False
    cache: CacheRequest = AS_SERVED

    @property
    def chat(self) -> bool:
        return not self.prompts

    @property
    def forces_call(self) -> bool:
        """Whether the answer is to be a call of a tool."""
        return self.constraint is not None and self.constraint.kind == "calls"

    @property
    def answers(self) -> int:
        """How many it asks for."""
        return max(1, len(self.prompts)) * self.wanted.n

    @property
    def sampling(self) -> SamplingSettings:
        """How tokens are chosen."""
        return self.wanted.sampling


@dataclass(frozen=True)
class RequestRules:
    """What holds where a request does not say, what becomes of unknown fields, and how many slots there are."""

    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    unknown: UnknownFields = field(default_factory=UnknownFields)
    slots: int = 16


def parse(body: Any, chat: bool, rules: RequestRules) -> CompletionRequest:
    """A request from the JSON of its body.

    Raises:
        ApiError: 400, for what it lacks, or what cannot be honoured.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {json_kind(body)}: send an object")
    fields = {name: value for name, value in body.items() if value is not None}
    known = IGNORED | NEUTRAL.keys() | COMMON | FIELDS | (FOR_CHAT if chat else FOR_COMPLETIONS)
    rules.unknown.check(fields.keys() - known)
    for name, neutral in NEUTRAL.items():
        if name in fields and not any(type(fields[name]) is type(value) and fields[name] == value for value in neutral):
            raise ApiError(400, f"{name} is not supported by this server: leave it out", name, "unsupported_parameter")
    limits = [integer(fields, name, 1, MOST_TOKENS) for name in ("max_completion_tokens", "max_tokens")]
    stream = boolean(fields, "stream")
    stream_options = typed(fields, "stream_options", dict, {})
    if stream_options and not stream:
        raise ApiError(400, "stream_options is only for stream=true: leave it out", "stream_options")
    checked: dict[str, Any] = {
        "model": typed(fields, "model", str, None),
        "max_tokens": next((limit for limit in limits if limit is not None), None),
        "wanted": answers_of(fields, rules.sampling, chat),
        "stop_strings": _stop_strings(fields),
        "slot": _slot(fields, rules.slots),
        "stream": stream,
        "include_usage": boolean(stream_options, "include_usage"),
        "cache": cache_field(fields),
    }
    checked["constraint_field"], checked["constraint"] = constraint_of(fields)
    own: dict[str, Any] = (
        chat_fields(fields) if chat else {"prompts": _prompts(fields), "echo": boolean(fields, "echo")}
    )
    form = checked["constraint_field"]
    if "constraint" in own and form not in ("", "response_format"):  # which says how texts are, and a call is none
        raise ApiError(400, f"tool_choice and {form} both say what the answer is to be: send one", form)
    checked |= own
    return CompletionRequest(**checked)


def _slot(fields: dict[str, Any], slots: int) -> int | None:
    slot = fields.get("id_slot")
    if slot is not None and (type(slot) is not int or not -1 <= slot < slots):
        raise ApiError(
            400, f"id_slot is no slot here: send a whole number from 0 to {slots - 1}, or -1 for any", "id_slot"
        )
    return slot


def _prompts(fields: dict[str, Any]) -> tuple[Prompt, ...]:
    given = fields.get("prompt")
    several = isinstance(given, list) and given and isinstance(given[0], str | list)
    prompts = given if several and isinstance(given, list) else [given]
    if len(prompts) > MOST_PROMPTS:
        raise ApiError(400, f"got {len(prompts):,} prompts: send at most {MOST_PROMPTS:,} in one request", "prompt")
    return tuple(_prompt(prompt) for prompt in prompts)


def _prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return unicode(prompt, "prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return tuple(prompt)
    raise ApiError(400, "prompt is missing, or neither a text nor token ids, nor a list of those", "prompt")


def _stop_strings(fields: dict[str, Any]) -> tuple[str, ...]:
    stops = fields.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ApiError(400, "stop is neither a text nor a list of texts, or one is empty", "stop")
    if len(stops) > MOST_STOPS:
        raise ApiError(400, f"got {len(stops)} stop strings: send at most {MOST_STOPS}", "stop")
    return tuple(unicode(stop, "stop") for stop in stops)
