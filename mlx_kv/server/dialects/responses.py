"""OpenAI's responses: the model of their bodies, and its translation into a chat."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, PlainValidator, Tag, model_validator

from mlx_kv.generation.grammar import Constraint
from mlx_kv.server import chat
from mlx_kv.server.dialects.response_writer import Conversations, ResponseWriter
from mlx_kv.server.fields import TAG, Body, FieldError, NonEmptyText, Text, json_kind, unsupported
from mlx_kv.server.handler import ParsedRequest
from mlx_kv.server.requests import ChatFields, CompletionRequest, Effort, RequestRules, TokenLimit
from mlx_kv.server.structured_output import (
    ConstraintField,
    ToolChoice,
    parse_response_format,
    parse_tool_choice,
)

TEXTS = ("input_text", "output_text", "text", "refusal")
REASONING_TEXTS = ("reasoning_text", "summary_text")
LOGPROBS = "message.output_text.logprobs"

# --- items of the input -----------------------------------------------------------------------------------------------


class MessageItem(Body):
    """What a user, the assistant or an operator has written."""

    role: Any = None
    content: Annotated[str, chat.joined_text(TEXTS)]

    def message(self) -> chat.Message:
        return chat.Message(self.role, [chat.Text(self.content)])


class ReasoningItem(Body):
    """What the assistant thought before its next message: in full, or a summary."""

    content: Annotated[str, chat.joined_text(REASONING_TEXTS)] = ""
    summary: Annotated[str, chat.joined_text(REASONING_TEXTS)] = ""

    @model_validator(mode="before")
    @classmethod
    def _content_or_summary(cls, value: dict[str, Any]) -> dict[str, Any]:
        name = "content" if value.get("content") else "summary"
        return {name: value.get(name) or ""}

    def message(self) -> chat.Message:
        return chat.Message("assistant", [chat.Reasoning(self.content or self.summary)])


class CallItem(Body):
    """A call of the assistant."""

    call_id: Text
    name: Text
    arguments: Annotated[Text, AfterValidator(chat.check_arguments)]

    def message(self) -> chat.Message:
        return chat.Message("assistant", [chat.Call(self.call_id, self.name, self.arguments)])


class CallOutputItem(Body):
    """The result of a call."""

    call_id: Text
    output: Annotated[str, chat.joined_text(TEXTS)]

    def message(self) -> chat.Message:
        return chat.Message("tool", [chat.Result(self.call_id, self.output)])


def _kind(item: Any) -> str:
    return f"{TAG}{item.get('type', 'message')}"


def _check_item(item: Any) -> Any:
    if not isinstance(item, dict):
        raise FieldError(f"is a JSON {json_kind(item)}: send an object")
    kind = item.get("type", "message")
    if kind not in ("message", "reasoning", "function_call", "function_call_output"):
        supported = "only messages, reasoning, function_call and function_call_output are supported"
        raise FieldError(f"is of the type {str(kind)[:80]!r}: {supported}")
    if kind == "message":
        chat.check_role(item.get("role"))
    return item


Item = Annotated[
    Annotated[MessageItem, Tag(f"{TAG}message")]
    | Annotated[ReasoningItem, Tag(f"{TAG}reasoning")]
    | Annotated[CallItem, Tag(f"{TAG}function_call")]
    | Annotated[CallOutputItem, Tag(f"{TAG}function_call_output")],
    Discriminator(_kind),
    BeforeValidator(_check_item),
]

# --- requests ---------------------------------------------------------------------------------------------------------


class FunctionTool(Body):
    """A tool that the client runs."""

    type: Literal["function"]
    name: NonEmptyText
    description: Any = None
    parameters: Any = None
    strict: Any = None

    def chat_tool(self) -> chat.Tool:
        """This tool in a chat."""
        return chat.tool(self.name, self.description, self.parameters, self.strict)


class Reasoning(Body):
    """The field `reasoning`."""

    effort: Effort | None = None


class TextSettings(Body):
    """The field `text`."""

    format: Annotated[Constraint | None, PlainValidator(parse_response_format)] = None


class StreamOptions(Body):
    """The field `stream_options`, which has no effect."""

    include_obfuscation: bool = False


class ResponseBody(ChatFields):
    """A request for a response."""

    ignored: ClassVar[frozenset[str]] = ChatFields.ignored | {
        *("context_management", "max_tool_calls", "prompt_cache_options")
    }
    input: Annotated[
        list[Item],
        Field(min_length=1, fail_fast=True, description="a text, or items"),
        BeforeValidator(lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value),
    ]
    instructions: Text | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: TokenLimit = None
    parallel_tool_calls: bool = True
    tools: list[FunctionTool] = Field(default_factory=list, fail_fast=True)
    tool_choice: Annotated[ToolChoice, PlainValidator(parse_tool_choice)] = ToolChoice()
    reasoning: Reasoning = Reasoning()
    text: TextSettings = TextSettings()
    include: list[Any] = Field(default_factory=list)
    stream_options: StreamOptions = StreamOptions()
    truncation: Any = "disabled"
    background: Annotated[Any, unsupported(False)] = None
    conversation: Annotated[Any, unsupported()] = None
    moderation: Annotated[Any, unsupported()] = None
    prompt: Annotated[Any, unsupported()] = None

    def completion_request(self, rules: RequestRules, messages: chat.Messages) -> CompletionRequest:
        """The chat of this body.

        Args:
            messages: of the conversation, without instructions.
        """
        if self.truncation != "disabled":
            rules.unknown.no_effect("truncation", "a conversation that is too long is refused, not cut")
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        tools = [tool.chat_tool() for tool in self.tools]
        response_format = ConstraintField("text.format", self.text.format)
        request = self.chat_request(
            rules, system + messages, tools, self.tool_choice, response_format, self.reasoning.effort
        )
        request.max_tokens = self.max_output_tokens
        request.one_call = not self.parallel_tool_calls
        request.top_logprobs = self.reported_logprobs(bool(LOGPROBS in self.include or self.top_logprobs))
        return request


class ResponsesDialect:
    """A `Dialect`: OpenAI's responses.

    Args:
        conversations: those that requests can continue.
    """

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    def __call__(self, body: Any, rules: RequestRules) -> ParsedRequest:
        parsed = ResponseBody.parse(body, rules.unknown)
        before = parsed.previous_response_id
        messages = [] if before is None else self._conversations.find(before, "previous_response_id").messages
        messages = messages + as_messages(parsed.input)
        request = parsed.completion_request(rules, messages)
        conversations = self._conversations if parsed.store else None
        echoed = {name: value for name, value in body.items() if value is not None and name != "truncation"}
        return ParsedRequest(request, lambda model: ResponseWriter(echoed, messages, model, conversations))


def as_messages(items: list[Item]) -> chat.Messages:
    """The messages of a chat that the items of an input are: neighbouring items of the assistant are one message."""
    messages: list[chat.Message] = []
    for message in (item.message() for item in items):
        last, (part,) = messages[-1] if messages else message, message.parts
        called = any(isinstance(each, chat.Call) for each in last.parts)
        if last is message or not last.role == message.role == "assistant" or (called and isinstance(part, chat.Text)):
            messages.append(message)
            continue
        if isinstance(part, chat.Reasoning):  # the last one counts
            last.parts = [each for each in last.parts if not isinstance(each, chat.Reasoning)]
        last.parts.append(part)
    return chat.as_chat(messages)
