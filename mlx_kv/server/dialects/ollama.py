"""Ollama's API: models of its bodies, which become OpenAI's, its answers in lines of JSON, and its lists of models."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_kv.generation.images import reads_images
from mlx_kv.mlxlm.loading import number_of_weights, weight_bytes
from mlx_kv.server import chat, requests
from mlx_kv.server.dialects.completions import ChatBody, CompletionBody, chat_logprob
from mlx_kv.server.handler import LoadRequest, ParsedRequest
from mlx_kv.server.json_http import ApiError, JsonResponse, json_bytes, read_body
from mlx_kv.server.output import Choice, Delta, OutputWriter, Usage
from mlx_kv.server.requests import MAX_TOKENS, Body, FieldError, RequestRules, Text, UnknownFields
from mlx_kv.server.served import DEFAULT, FOREVER, ModelTable, Served
from mlx_kv.server.worker import Worker

DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h|)")
SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
MAX_SECONDS = 365 * 86_400.0
VERSION = "0.13.0"  # of Ollama, of which this is the API: clients check for a minimum
# Options that are fields of OpenAI's API or of mlx_lm.server by the same name.
SAME = {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop"}


# --- requests ---------------------------------------------------------------------------------------------------------


def _describe(value: Any) -> str:
    """An image, as base64, in words."""
    return requests.part_text({"type": "image", "source": {"data": value}})


Images = list[Annotated[str, BeforeValidator(_describe)]]


class Options(Body):
    """The field `options`. Those of loading a model and of samplers that are not here have no effect."""

    model_config = ConfigDict(extra="allow")
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            *SAME,
            *("num_ctx", "num_batch", "num_gpu", "num_keep", "num_thread", "numa", "main_gpu", "low_vram", "f16_kv"),
            *("logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only", "penalize_newline"),
            *("tfs_z", "typical_p", "mirostat", "mirostat_eta", "mirostat_tau"),
        }
    )
    num_predict: int | None = Field(None, ge=-2, le=MAX_TOKENS)
    repeat_penalty: float | None = Field(None, ge=0, le=100)
    repeat_last_n: int | None = Field(None, ge=-1, le=MAX_TOKENS)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Some clients send whole numbers as 2.0."""
        whole = {name for name, each in value.items() if isinstance(each, float) and each.is_integer()}
        return {name: int(each) if name in whole else each for name, each in value.items()}

    def fields(self) -> dict[str, Any]:
        """These options as OpenAI's and mlx_lm.server's fields, which check the values of those with the same name."""
        fields = {name: value for name, value in (self.model_extra or {}).items() if name in SAME}
        if self.num_predict:
            fields["max_tokens"] = self.num_predict if self.num_predict > 0 else MAX_TOKENS  # as the context allows
        if self.repeat_penalty is not None and self.repeat_last_n != 0:
            fields["repetition_penalty"] = self.repeat_penalty
        if self.repeat_last_n:
            fields["repetition_context_size"] = max(self.repeat_last_n, 0)  # 0 is all tokens
        return fields


def _format(value: Any) -> Any:
    if value not in ("", "json") and not isinstance(value, dict):
        raise FieldError('is not a format: send "json", or a JSON schema')
    return value


def _seconds(value: Any) -> Any:
    """Seconds of a duration as Ollama takes it: a number, or as in 5m, 1h30m, 500ms."""
    if not isinstance(value, str):
        if isinstance(value, int | float) and not -MAX_SECONDS <= value <= MAX_SECONDS:
            raise FieldError("is longer than a year: send fewer seconds, or -1")
        return value
    parts = DURATION.findall(value)
    if not parts or "".join(map("".join, parts)) != value.removeprefix("-"):
        raise FieldError('is not a duration: send seconds, or as in "5m"')
    seconds = sum(float(number) * SECONDS[unit] for number, unit in parts)
    return -seconds if value.startswith("-") else min(seconds, MAX_SECONDS)


KeepAlive = Annotated[float | None, BeforeValidator(_seconds)]


class OllamaBody(Body):
    """The fields that both requests share."""

    model: str | None = None
    stream: bool = True
    format: Annotated[Any, AfterValidator(_format)] = ""
    options: dict[str, Any] = Field(default_factory=dict)
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    thinking_budget: requests.ThinkingBudget = None
    logprobs: bool = False
    top_logprobs: int | None = None
    keep_alive: KeepAlive = None

    def fields(self, unknown: UnknownFields) -> dict[str, Any]:
        """These fields as OpenAI's."""
        fields = Options.parse(self.options, unknown).fields() | {"model": self.model, "stream": self.stream}
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        return fields

    def chat_fields(self, unknown: UnknownFields) -> dict[str, Any]:
        """These fields as those of OpenAI's chats."""
        fields = self.fields(unknown) | {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        fields["thinking_budget"] = self.thinking_budget
        if isinstance(self.think, bool):
            return fields | {"enable_thinking": self.think}
        return fields if self.think is None else fields | {"reasoning_effort": self.think}


class CalledFunction(Body):
    """The function of a call."""

    name: Text
    arguments: dict[str, Any] = Field(default_factory=dict)


class Call(Body):
    """A call in a message of the assistant."""

    id: Text = ""
    function: CalledFunction


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    thinking: Text = ""
    images: Images = Field(default_factory=list)
    tool_calls: list[Call] = Field(default_factory=list)
    tool_name: Text = ""
    tool_call_id: Text = ""


class OllamaChatBody(OllamaBody):
    """A request of /api/chat."""

    messages: list[Message] = Field(default_factory=list, fail_fast=True)
    tools: Annotated[list[dict[str, Any]], requests.Unchanged] = Field(default_factory=list)

    def chat_messages(self) -> chat.Messages:
        """The messages as OpenAI's, in which calls and their results have ids."""
        messages: list[chat.Message] = []
        open_calls = chat.OpenCalls()
        for place, message in enumerate(self.messages):
            texts = [chat.Text(text) for text in (message.content, *message.images)]
            parts: list[chat.Part] = [chat.Reasoning(message.thinking), *texts]
            calls = [
                chat.Call.of(call.id or f"call_{place}_{n}", call.function.name, call.function.arguments)
                for n, call in enumerate(message.tool_calls)
            ]
            open_calls.add(calls)
            if message.role == "tool":
                content = requests.LINE.join([each for each in (message.content, *message.images) if each])
                parts = [open_calls.result(message.tool_call_id, content, message.tool_name)]
            messages.append(chat.Message(message.role, [*parts, *calls]))
        return chat.as_chat(messages)

    def openai_body(self, unknown: UnknownFields, has_template: bool) -> ChatBody:
        """This request as OpenAI's."""
        last = self.messages[-1]
        body = self.chat_fields(unknown) | {"messages": self.chat_messages(), "tools": self.tools}
        body["continue_final_message"] = last.role == "assistant" and not last.tool_calls
        return ChatBody.parse(body, unknown)


class GenerateBody(OllamaBody):
    """A request of /api/generate."""

    ignored: ClassVar[frozenset[str]] = frozenset({"context"})
    prompt: Text = ""
    system: Text = ""
    raw: bool = False
    images: Images = Field(default_factory=list)
    suffix: Annotated[Any, requests.unsupported("")] = None
    template: Annotated[Any, requests.unsupported("")] = None

    def openai_body(self, unknown: UnknownFields, has_template: bool) -> ChatBody | CompletionBody:
        """This request as OpenAI's: a chat of one prompt, or a text, if it is raw or the model has no template."""
        if self.raw or not has_template:
            if any(map(requests.IMAGE_MARK.search, self.images)):
                raise ApiError(
                    400, "a prompt without a chat template has no images: leave out raw, or images", "images"
                )
            text = self.prompt if self.raw or not self.system else f"{self.system}\n\n{self.prompt}"
            logprobs = (self.top_logprobs or 0) if self.logprobs else None
            return CompletionBody.parse(self.fields(unknown) | {"prompt": text, "logprobs": logprobs}, unknown)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": requests.LINE.join([self.prompt, *self.images])})
        return ChatBody.parse(self.chat_fields(unknown) | {"messages": messages}, unknown)


class OllamaDialect:
    """A `Dialect`: /api/chat or /api/generate.

    Args:
        kind: of the bodies.
    """

    def __init__(self, kind: type[OllamaChatBody | GenerateBody], table: ModelTable) -> None:
        self._kind, self._table = kind, table

    def __call__(self, body: Any, rules: RequestRules) -> ParsedRequest | LoadRequest:
        parsed, is_chat = self._kind.parse(body, rules.unknown), self._kind is OllamaChatBody
        names = self._table.find(parsed.model).names
        if not (parsed.messages if isinstance(parsed, OllamaChatBody) else parsed.prompt):
            reason = "unload" if parsed.keep_alive == 0 else "load"
            empty = OllamaWriter(names.name, is_chat).fields(Delta())
            return LoadRequest(JsonResponse(empty | {"done": True, "done_reason": reason}), parsed.keep_alive)
        request = parsed.openai_body(rules.unknown, rules.has_template).completion_request(rules)
        echoed = parsed.model if parsed.model in names else None
        return ParsedRequest(request, lambda model: OllamaWriter(echoed or model, is_chat), parsed.keep_alive)


# --- answers ----------------------------------------------------------------------------------------------------------


def now() -> str:
    """The time, as in RFC 3339."""
    return rfc3339(datetime.now(UTC))


def rfc3339(time: datetime) -> str:
    """A time in UTC, as Ollama writes it."""
    return time.isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """A duration that is at least 0."""
    return max(0, round(seconds * 1e9))


class OllamaWriter(OutputWriter):
    """The lines of a response."""

    stream_type = b"application/x-ndjson"
    waiting = b""  # clients parse each line

    def __init__(self, model: str, chat: bool) -> None:
        self._model, self._chat = model, chat

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        return self.fields(choice.answer) | self._end(choice)

    def part(self, choice: Choice, delta: Delta) -> bytes:
        if not (delta.fields or delta.logprobs):
            return b""
        return _line(self.fields(delta) | {"done": False})

    def end(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        return _line(self.fields(Delta()) | self._end(choice))

    def failed(self, error: ApiError) -> bytes:
        return _line({"error": error.message})

    def fields(self, delta: Delta) -> dict[str, Any]:
        """A part of the answer."""
        common: dict[str, Any] = {"model": self._model, "created_at": now()}
        if delta.logprobs:
            common["logprobs"] = [chat_logprob(token) for token in delta.logprobs]
        thinking = {"thinking": delta.reasoning} if delta.reasoning else {}
        if not self._chat:
            return common | {"response": delta.content} | thinking
        calls = {"tool_calls": [_call(call["function"]) for call in delta.tool_calls]} if delta.tool_calls else {}
        return common | {"message": {"role": "assistant", "content": delta.content} | thinking | calls}

    def _end(self, choice: Choice) -> dict[str, Any]:
        usage, ended = Usage.of([choice]), time.monotonic()
        first = ended if choice.first_token is None else choice.first_token
        return {
            "done": True,
            "done_reason": "length" if choice.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(ended - choice.job.since),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(first - choice.job.since),
            "eval_count": usage.generated,
            "reasoning_tokens": usage.reasoning,
            "eval_duration": nanoseconds(ended - first),
        }


def _line(data: dict[str, Any]) -> bytes:
    return json_bytes(data) + b"\n"


def _call(function: dict[str, Any]) -> dict[str, Any]:
    """A call, with its arguments as an object."""
    return {"function": {"name": function["name"], "arguments": chat.arguments_object(function["arguments"])}}


# --- models -----------------------------------------------------------------------------------------------------------


class ShowBody(Body):
    """A request of /api/show, which once named the model `name`."""

    model: str | None = None
    name: str | None = None
    verbose: bool = False


class OllamaRoutes:
    """/api/tags, /api/ps, /api/show and /api/version."""

    def __init__(self, worker: Worker, table: ModelTable, limits: requests.Limits) -> None:
        self._served, self._table, self._limits, self._since = worker.served, table, limits, now()

    async def tags(self, request: Request) -> Response:
        """The names of the models."""
        names = [(served, name) for served in self._served for name in served.names.all if name != DEFAULT]
        return JsonResponse({"models": [self._entry(served, name) for served, name in names]})

    async def running(self, request: Request) -> Response:
        """The models with weights in memory."""
        loaded = [served for served in self._served if served.state != "unloaded"]
        return JsonResponse({"models": [self._running(served) for served in loaded]})

    def _running(self, served: Served) -> dict[str, Any]:
        until, size = served.expires_at, weight_bytes(served.models.model)
        at = FOREVER if until is None else rfc3339(datetime.fromtimestamp(min(until, time.time() + MAX_SECONDS), UTC))
        return self._entry(served, served.names.name) | {"size_vram": size, "expires_at": at}

    async def version(self, request: Request) -> Response:
        """The version of Ollama's API."""
        return JsonResponse({"version": VERSION})

    async def show(self, request: Request) -> Response:
        """What is known of the model."""
        body = await read_body(request, self._limits.body_bytes, self._limits.body_seconds)
        parsed = ShowBody.parse(body, UnknownFields(self._limits.strict))
        served = self._table.find(parsed.model or parsed.name)
        tokenizer, details = served.models.tokenizer, _details(served)
        template, family = getattr(tokenizer, "chat_template", None), details["family"]
        count = number_of_weights(served.models.model)
        info: dict[str, Any] = {"general.architecture": family, "general.parameter_count": count}
        if served.context is not None:
            info[f"{family}.context_length"] = served.context
        capabilities = ["completion"]
        capabilities += ["tools"] if tokenizer.has_tool_calling else []
        capabilities += ["thinking"] if tokenizer.has_thinking else []
        capabilities += ["vision"] if reads_images(served.models.model) else []
        return JsonResponse(
            {
                "modelfile": f"FROM {served.names.name}",
                "parameters": "",
                "template": template if isinstance(template, str) else "",
                "details": details,
                "model_info": info,
                "capabilities": capabilities,
                "modified_at": self._since,
            }
        )

    def _entry(self, served: Served, name: str) -> dict[str, Any]:
        digest = {"digest": "", "size": weight_bytes(served.models.model), "modified_at": self._since}
        return {"name": name, "model": name, **digest, "details": _details(served)}


def _details(served: Served) -> dict[str, Any]:
    model = served.models.model
    family, count = str(getattr(getattr(model, "args", model), "model_type", "unknown")), number_of_weights(model)
    return {
        "parent_model": "",
        "format": "mlx",
        "family": family,
        "families": [family],
        "parameter_size": parameter_size(count),
        "quantization_level": f"{8 * weight_bytes(model) / max(count, 1):.3g} bits",
    }


def parameter_size(count: int) -> str:
    """A number of parameters in words: 1.7B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)
