"""Anthropic's messages: the model of their bodies, its translation into a chat, and their answers."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag, model_validator

from mlx_kv.generation.grammar import Constraint
from mlx_kv.server import chat, requests
from mlx_kv.server.handler import ParsedRequest
from mlx_kv.server.json_http import ApiError, anthropic_error, event
from mlx_kv.server.output import Block, Blocks, Change, Choice, Delta, Event, OutputWriter, Usage
from mlx_kv.server.requests import Body, CompletionRequest, FieldError, RequestRules, Text, TokenLimit

REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
ROLES = ("user", "assistant", "system")
BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
ONE_ROLE = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}  # whose blocks these are
CLIENT_HEADER = "x-anthropic-billing-header:"  # the first line of prompts of Claude Code, which differs in each request

# --- blocks of messages -----------------------------------------------------------------------------------------------


class TextBlock(Body):
    """Text."""

    text: Text

    def part(self) -> chat.Part:
        return chat.Text(self.text)


class ThinkingBlock(Body):
    """Reasoning of the assistant."""

    thinking: Text

    def part(self) -> chat.Part:
        return chat.Reasoning(self.thinking)


class RedactedBlock(Body):
    """Encrypted reasoning of another model, which is ignored."""

    def part(self) -> chat.Part:
        return chat.Text("")


class ToolUseBlock(Body):
    """A call of the assistant."""

    id: Text
    name: Text
    input: dict[str, Any]

    def part(self) -> chat.Part:
        return chat.Call.of(self.id, self.name, self.input)


class ToolResultBlock(Body):
    """The result of a call."""

    tool_use_id: Text
    content: Annotated[str, requests.joined_text(requests.LINE)] = ""
    is_error: bool = False

    def part(self) -> chat.Part:
        return chat.Result(self.tool_use_id, f"error: {self.content}" if self.is_error else self.content)


class OtherBlock(requests.OtherPart):
    """A block of any other type."""

    def part(self) -> chat.Part:
        return chat.Text(self.text)


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return f"{requests.TAG}{kind if kind in BLOCKS else 'other'}"


MessageBlock = Annotated[
    Annotated[TextBlock, Tag(f"{requests.TAG}text")]
    | Annotated[ThinkingBlock, Tag(f"{requests.TAG}thinking")]
    | Annotated[RedactedBlock, Tag(f"{requests.TAG}redacted_thinking")]
    | Annotated[ToolUseBlock, Tag(f"{requests.TAG}tool_use")]
    | Annotated[ToolResultBlock, Tag(f"{requests.TAG}tool_result")]
    | Annotated[OtherBlock, Tag(f"{requests.TAG}other")],
    Discriminator(_kind),
]


class Message(Body):
    """A message of a conversation."""

    role: str
    content: Annotated[list[MessageBlock], Field(fail_fast=True)]

    @model_validator(mode="before")
    @classmethod
    def _check_blocks(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        role, content = value.get("role"), value.get("content")
        if not isinstance(role, str) or role not in ROLES:
            raise FieldError(f"is {str(role)[:80]!r}: send user or assistant", ".role")
        if isinstance(content, str):
            return {"role": role, "content": [{"type": "text", "text": content}]}
        if not isinstance(content, list) or not (content or role == "assistant"):  # whose answer may have been empty
            raise FieldError("is missing or empty: send a text, or blocks", ".content")
        for index, block in enumerate(content):
            kind = str(block.get("type")) if isinstance(block, dict) else ""
            if ONE_ROLE.get(kind, role) != role:
                problem = f"is a block of the type {kind!r}, which messages of {role} cannot have: leave it out"
                raise FieldError(problem, f".content[{index}]")
        return value


# --- requests ---------------------------------------------------------------------------------------------------------


class FunctionTool(Body):
    """A tool that the client runs, and describes."""

    name: requests.NonEmptyText
    input_schema: dict[str, Any]
    description: str = ""
    strict: bool | None = None


def _with_schema(tools: Any) -> Any:
    """The tools without those of Anthropic's servers and models, which have a type in place of a schema."""
    if not isinstance(tools, list):
        return tools
    kinds = [isinstance(each, dict) and "input_schema" not in each and each.get("type") for each in tools]
    for kind in kinds:
        if isinstance(kind, str) and kind != "custom":
            requests.leave_out(f"tools of the type {kind[:80]!r}")
    return [tool for tool, kind in zip(tools, kinds, strict=True) if not isinstance(kind, str) or kind == "custom"]


class Choose(Body):
    """The field `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def chat_choice(self) -> requests.ToolChoice:
        """This choice in a chat."""
        if self.type != "tool":
            return requests.ToolChoice("required" if self.type == "any" else self.type)
        if self.name is None:
            raise ApiError(400, "tool_choice.name is missing: send the name of a tool", "tool_choice")
        return requests.ToolChoice("function", self.name)


class Thinking(Body):
    """The field `thinking`."""

    type: Literal["enabled", "adaptive", "disabled"] = "adaptive"
    budget_tokens: requests.ThinkingBudget = None


def _output_format(value: Any) -> Constraint | None:
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        raise FieldError("is not of the type json_schema: send one")
    return requests.parse_response_format(value)


class OutputConfig(Body):
    """The field `output_config`."""

    format: Annotated[Constraint | None, PlainValidator(_output_format)] = None
    effort: requests.Effort | None = None


class CountBody(requests.ChatFields):
    """A request to count the tokens of a message's prompt."""

    ignored: ClassVar[frozenset[str]] = requests.ChatFields.ignored | {
        *("betas", "cache_control", "container", "context_management", "diagnostics", "inference_geo", "speed")
    }
    max_tokens: TokenLimit = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    system: Annotated[
        list[Annotated[str, BeforeValidator(requests.part_text)]],
        BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value),
    ] = Field(default_factory=list, fail_fast=True, description="a text, or blocks")
    temperature: float | None = Field(None, ge=0, le=1)
    stop_sequences: requests.StopList = Field(default_factory=list)
    tools: Annotated[list[FunctionTool], BeforeValidator(_with_schema)] = Field(default_factory=list, fail_fast=True)
    tool_choice: Choose = Choose()
    thinking: Thinking = Thinking()
    output_config: OutputConfig = OutputConfig()

    def completion_request(self, rules: RequestRules) -> CompletionRequest:
        """The chat of this body."""
        if {"stop", "stop_sequences"} <= self.model_fields_set:
            raise ApiError(400, "stop and stop_sequences both end an answer: send one", "stop")
        texts = self.system
        if texts and texts[0].startswith(CLIENT_HEADER) and not rules.client_headers:
            texts = [texts[0].partition("\n")[2].lstrip("\n"), *texts[1:]]
        system = [chat.Message("system", [chat.Text(text) for text in texts])] if any(texts) else []
        conversation = [chat.Message(each.role, [block.part() for block in each.content]) for each in self.messages]
        messages = chat.as_chat(system + conversation)
        thinks = self.enable_thinking if self.thinking.type == "adaptive" else self.thinking.type == "enabled"
        continues = self.messages[-1].role == "assistant" and not messages[-1].get("tool_calls")
        budget = self.thinking_budget if self.thinking.budget_tokens is None else self.thinking.budget_tokens
        changes = {"enable_thinking": thinks, "continue_final_message": continues, "thinking_budget": budget}
        body = self.model_copy(update=changes)
        request = body.chat_request(
            rules,
            messages,
            [chat.tool(tool.name, tool.description, tool.input_schema, tool.strict) for tool in self.tools],
            self.tool_choice.chat_choice(),
            requests.ConstraintField("output_config.format", self.output_config.format),
            self.output_config.effort,
        )
        request.max_tokens = self.max_tokens
        request.one_call = self.tool_choice.disable_parallel_tool_use
        request.stop_strings = tuple(self.stop_sequences or self.stop)
        request.top_logprobs = self.reported_logprobs(False)
        return request


class MessagesBody(CountBody):
    """A request for a message."""

    max_tokens: int = Field(
        ge=1, le=requests.MAX_TOKENS, description="the maximum number of tokens of the answer, at least 1"
    )


def messages(body: Any, rules: RequestRules) -> ParsedRequest:
    """A `Dialect`: Anthropic's messages."""
    return ParsedRequest(MessagesBody.parse(body, rules.unknown).completion_request(rules), MessageWriter)


def token_count_request(body: Any, rules: RequestRules) -> CompletionRequest:
    """The request of which the prompt's tokens are counted."""
    return CountBody.parse(body, rules.unknown).completion_request(rules)


# --- answers ----------------------------------------------------------------------------------------------------------


class MessageWriter(OutputWriter):
    """The objects of one message."""

    def __init__(self, model: str) -> None:
        self._blocks = Blocks()
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self.waiting = _event({"type": "ping"})

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        for _ in (*self._blocks.add(choice.answer), *self._blocks.finish()):
            pass
        content = [_block(block, block.text) for block in self._blocks.all]
        return self._message | {"content": content, **_end(choice), "usage": _usage(Usage.of(choices))}

    def begin(self, choices: Sequence[Choice]) -> bytes:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        empty["usage"] = _usage(Usage.of(choices))
        return _event({"type": "message_start", "message": self._message | empty}) + self.waiting

    def part(self, choice: Choice, delta: Delta) -> bytes:
        data = _events(self._blocks.add(delta))
        return data + _events(self._blocks.finish()) if choice.finish_reason else data

    def end(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        end = {"type": "message_delta", "delta": _end(choice), "usage": _usage(Usage.of(choices))}
        return _event(end) + _event({"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        return _event(anthropic_error(error))


def _events(changes: Iterable[Change]) -> bytes:
    return b"".join(_change(*change) for change in changes)


def _change(change: Event, block: Block, text: str) -> bytes:
    at = {"index": block.index}
    if change is Event.BEGINS:
        return _event({"type": "content_block_start", **at, "content_block": _block(block, "")})
    if change is Event.ENDS:
        return _event({"type": "content_block_stop", **at})
    kind, name = {
        chat.Text: ("text_delta", "text"),
        chat.Reasoning: ("thinking_delta", "thinking"),
        chat.Call: ("input_json_delta", "partial_json"),
    }[block.kind]
    return _event({"type": "content_block_delta", **at, "delta": {"type": kind, name: text}})


def _block(block: Block, text: str) -> dict[str, Any]:
    """A block with a text; a call with its arguments, parsed from the text."""
    if block.kind is chat.Text:
        return {"type": "text", "text": text}
    if block.kind is chat.Reasoning:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": chat.arguments_object(text)}


def _end(choice: Choice) -> dict[str, Any]:
    matched = choice.job.stop_strings.matched
    if choice.finish_reason == "stop" and matched is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": REASONS.get(choice.finish_reason, "end_turn"), "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, int]:
    """Token counts, with those of cached prefixes counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
        "reasoning_tokens": usage.reasoning,
    }


def _event(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])
