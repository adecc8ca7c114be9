"""OpenAI's completions and chat completions: models of their bodies, and their answers."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from mlx_kv.generation.grammar import Constraint
from mlx_kv.server import chat, requests
from mlx_kv.server.chat import Tool
from mlx_kv.server.handler import ParsedRequest
from mlx_kv.server.json_http import ApiError, event
from mlx_kv.server.output import Choice, Delta, OutputWriter, TokenText, Usage
from mlx_kv.server.requests import Body, CompletionRequest, FieldError, RequestRules, Text, TokenLimit

MAX_PROMPTS, MAX_ANSWERS = 1024, 128
REASONING = ("reasoning", "reasoning_content")  # fields of an assistant's message

Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
TopLogprobs = Annotated[int, Field(ge=0, le=requests.MAX_TOP_LOGPROBS)]

# --- requests ---------------------------------------------------------------------------------------------------------


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class OpenAIFields(requests.GenerationBody):
    """The fields that completions and chat completions share."""

    max_tokens: TokenLimit = None
    stream_options: StreamOptions = StreamOptions()
    response_format: Annotated[Constraint | None, PlainValidator(requests.parse_response_format)] = None
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    best_of: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    function_call: Annotated[Any, requests.unsupported("none", "auto")] = None
    functions: Annotated[Any, requests.unsupported([])] = None
    modalities: Annotated[Any, requests.unsupported(["text"])] = None

    def add_openai_fields(self, request: CompletionRequest) -> CompletionRequest:
        """Adds these fields to a request."""
        if self.best_of not in (None, self.n):
            raise ApiError(400, "best_of differs from n: send the same number, since all answers are sent", "best_of")
        if self.stream_options.model_fields_set and not self.stream:
            raise ApiError(400, "stream_options is only for stream=true: leave it out", "stream_options")
        request.include_usage = self.stream_options.include_usage
        request.n = self.n
        return request


def prompt_list(value: Any) -> Any:
    """One prompt as a list of one."""
    several = isinstance(value, list) and value and isinstance(value[0], str | list)
    return value if several else [value]


class CompletionBody(OpenAIFields):
    """A request for completions."""

    prompt: Annotated[
        list[Annotated[Text | Tokens, Field(union_mode="left_to_right")]],
        Field(max_length=MAX_PROMPTS, fail_fast=True, description="a text, token ids, or up to 1,024 of these"),
        BeforeValidator(prompt_list),
    ]
    echo: bool = False
    # The number of likeliest tokens, or a boolean as in a chat.
    logprobs: Annotated[bool | TopLogprobs | None, Field(description="a whole number from 0 to 20, or a boolean")] = (
        None
    )

    def completion_request(self, rules: RequestRules) -> CompletionRequest:
        """The request of this body."""
        request = self.request(rules, requests.ConstraintField("response_format", self.response_format))
        request.prompts, request.echo, request.max_tokens = self.prompt, self.echo, self.max_tokens
        if self.logprobs is None or isinstance(self.logprobs, bool):
            request.top_logprobs = self.reported_logprobs(bool(self.logprobs))
        elif self.echo:
            raise ApiError(400, "an echoed prompt has no log-probabilities: leave out echo or logprobs", "echo")
        else:
            request.top_logprobs = self.logprobs
        return self.add_openai_fields(request)


class CalledFunction(Body):
    """The function of a call, and its arguments."""

    name: Text
    arguments: Any = None


class Call(Body):
    """A call in a message of the assistant."""

    id: Text = ""
    function: CalledFunction


class Message(Body):
    """A message of a chat, of which a chat template may read more fields than these."""

    model_config = ConfigDict(extra="allow")
    role: Any = None
    content: Annotated[str, requests.joined_text()] = ""
    tool_calls: list[Call] = Field(default_factory=list, fail_fast=True)
    function_call: CalledFunction | None = None  # OpenAI's before tools
    tool_call_id: Text = ""

    @model_validator(mode="before")
    @classmethod
    def _without_empty_content(cls, value: Any) -> Any:
        empty = isinstance(value, dict) and value.get("content") == []
        return {name: each for name, each in value.items() if name != "content"} if empty else value

    @model_validator(mode="after")
    def _check_role_and_content(self) -> Self:
        requests.check_role(self.role)
        instead = self.tool_calls or self.function_call or any((self.model_extra or {}).get(name) for name in REASONING)
        if "content" not in self.model_fields_set and not (self.role == "assistant" and instead):
            raise FieldError("is missing: send a text", ".content")
        return self

    def calls(self, place: int) -> list[chat.Call]:
        """Its calls; those without an id get one by the place of the message."""
        calls = self.tool_calls or ([Call(function=self.function_call)] if self.function_call else [])
        return [
            chat.Call.of(each.id or f"call_{place}_{n}", each.function.name, each.function.arguments)
            for n, each in enumerate(calls)
        ]


def conversation(messages: Sequence[Message]) -> chat.Messages:
    """The messages with the content that all dialects have; other fields stay, which chat templates read."""
    found: chat.Messages = []
    open_calls = chat.OpenCalls()
    for place, message in enumerate(messages):
        role = chat.CHAT_ROLES.get(message.role, message.role)
        fields = dict(message.model_extra or {})
        calls = message.calls(place) if role == "assistant" else []
        open_calls.add(calls)
        if role == "tool":
            name = fields.get("name")
            result = open_calls.result(message.tool_call_id, message.content, name if isinstance(name, str) else "")
            fields["tool_call_id"] = result.call_id
        found.append(
            {
                **fields,
                "role": role,
                "content": message.content,
                **({"tool_calls": [call.as_chat() for call in calls]} if calls else {}),
            }
        )
    return found


def _roles(roles: dict[str, Any]) -> dict[str, str]:
    for role, prefix in roles.items():
        if not isinstance(prefix, str):
            raise FieldError(f"has a JSON {requests.json_kind(prefix)} for {role[:80]!r}: send texts")
        requests.unicode_text(prefix)
    return roles


class ChatBody(requests.ChatFields, OpenAIFields):
    """A request for chat completions."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    tools: Annotated[list[Tool], Field(fail_fast=True), requests.Unchanged] = Field(default_factory=list)
    tool_choice: Annotated[requests.ToolChoice, PlainValidator(requests.parse_tool_choice)] = requests.ToolChoice()
    parallel_tool_calls: bool = True
    max_completion_tokens: TokenLimit = None
    reasoning_effort: requests.Effort | None = None
    role_mapping: Annotated[dict[str, Any], AfterValidator(_roles)] = Field(default_factory=dict)
    logprobs: bool = False

    def completion_request(self, rules: RequestRules) -> CompletionRequest:
        """The request of this body."""
        response_format = requests.ConstraintField("response_format", self.response_format)
        request = self.chat_request(
            rules, conversation(self.messages), self.tools, self.tool_choice, response_format, self.reasoning_effort
        )
        request.max_tokens = self.max_completion_tokens or self.max_tokens
        request.roles = self.role_mapping
        request.one_call = not self.parallel_tool_calls
        request.top_logprobs = self.reported_logprobs(self.logprobs)
        return self.add_openai_fields(request)


def _parse(kind: type[CompletionBody | ChatBody], body: Any, rules: RequestRules) -> ParsedRequest:
    request = kind.parse(body, rules.unknown).completion_request(rules)
    return ParsedRequest(request, partial(CompletionWriter, request))


# Each is a `Dialect`.
completions, chats = partial(_parse, CompletionBody), partial(_parse, ChatBody)


# --- answers ----------------------------------------------------------------------------------------------------------


class CompletionWriter(OutputWriter):
    """The objects of one answer, which share an id, a time and a model."""

    last = b"data: [DONE]\n\n"

    def __init__(self, request: CompletionRequest, model: str) -> None:
        self._request = request
        self._started: set[int] = set()  # choices for which a role was sent
        self._offsets: Counter[int] = Counter()  # characters of each choice's tokens with log-probabilities
        self._common = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        kind = "chat.completion" if self._request.chat else "text_completion"
        answers = [self._choice(choice) for choice in choices]
        return self._common | {"object": kind, "choices": answers, "usage": usage_of(Usage.of(choices))}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        answer, logprobs = choice.answer, self._logprobs(choice, choice.answer)
        fields: dict[str, Any] = {"index": choice.index, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        if self._request.chat:
            content = answer.content or (None if answer.tool_calls or answer.reasoning else "")
            fields["message"] = {"role": "assistant"} | answer.fields | {"content": content, "refusal": None}
        else:
            fields["text"] = answer.content
        return fields

    def _logprobs(self, choice: Choice, delta: Delta) -> dict[str, Any] | None:
        """Log-probabilities of the tokens of an answer, or of a part of it; None where they are not requested."""
        if choice.texts is None:
            return None
        if self._request.chat:
            return {"content": [chat_logprob(token) for token in delta.logprobs], "refusal": None}
        offsets = list(accumulate((len(token.text) for token in delta.logprobs), initial=self._offsets[choice.index]))
        self._offsets[choice.index] = offsets.pop()
        tops = [{other.text: other.logprob for other in reversed(token.top)} for token in delta.logprobs]
        return {
            "tokens": [token.text for token in delta.logprobs],
            "token_logprobs": [token.logprob for token in delta.logprobs],
            "top_logprobs": tops if self._request.top_logprobs else None,
            "text_offset": offsets,
        }

    def part(self, choice: Choice, delta: Delta) -> bytes:
        data = b""
        if delta.fields or delta.logprobs or (choice.finish_reason and not self._request.chat):
            data = event(self.chunk(choice, delta))
        if choice.finish_reason:
            data += event(self.chunk(choice, Delta(), choice.finish_reason))
        return data

    def chunk(self, choice: Choice, delta: Delta, finish_reason: str | None = None) -> dict[str, Any]:
        """A part of a streamed answer."""
        logprobs = self._logprobs(choice, delta) if delta.logprobs else None
        fields: dict[str, Any] = {"index": choice.index, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._request.chat:
            first = {} if choice.index in self._started else {"role": "assistant", "content": ""}
            fields["delta"] = first | delta.fields
            self._started.add(choice.index)
        else:
            fields["text"] = delta.content
        return self._chunk([fields]) | ({"usage": None} if self._request.include_usage else {})

    def end(self, choices: Sequence[Choice]) -> bytes:
        if not self._request.include_usage:
            return b""
        return event(self._chunk([]) | {"usage": usage_of(Usage.of(choices))})

    def failed(self, error: ApiError) -> bytes:
        return event(error.body)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._request.chat else "text_completion"
        return self._common | {"object": kind, "choices": choices}


def chat_logprob(token: TokenText, is_top: bool = False) -> dict[str, Any]:
    """A token with its log-probability, and those of the likeliest tokens unless it is one of those."""
    fields = {"id": token.token, "token": token.text, "bytes": list(token.data), "logprob": token.logprob}
    return fields if is_top else fields | {"top_logprobs": [chat_logprob(other, is_top=True) for other in token.top]}


def usage_of(usage: Usage) -> dict[str, Any]:
    """Token counts, those of cached prefixes among them."""
    fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt_tokens + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
    if usage.reasoning:
        fields["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
    return fields
