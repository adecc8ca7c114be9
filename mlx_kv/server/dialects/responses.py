"""OpenAI's responses: the model of their bodies, its translation into a chat, answers as whole or as events, and the
conversations that a later request can continue.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, PlainValidator, Tag, model_validator

from mlx_kv.generation.grammar import Constraint
from mlx_kv.server import chat, requests
from mlx_kv.server.dialects.completions import chat_logprob
from mlx_kv.server.handler import ParsedRequest
from mlx_kv.server.json_http import ApiError, event
from mlx_kv.server.output import Block, Blocks, Change, Choice, Delta, Event, OutputWriter, Usage
from mlx_kv.server.requests import Body, CompletionRequest, FieldError, RequestRules, Text, TokenLimit

# Fields of the request that a response repeats, and their values where the request leaves them out.
ECHOED: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
PREFIXES = {chat.Reasoning: "rs", chat.Text: "msg", chat.Call: "fc"}
MAX_BYTES, IMAGE_BYTES = 32 * 2**20, 64 * 2**20  # of JSON; of images
LOGPROBS = "message.output_text.logprobs"

# --- items of the input -----------------------------------------------------------------------------------------------


class MessageItem(Body):
    """What a user, the assistant or an operator has written."""

    role: Any = None
    content: Annotated[str, requests.joined_text(requests.LINE)]

    def message(self) -> chat.Message:
        return chat.Message(self.role, [chat.Text(self.content)])


class ReasoningItem(Body):
    """What the assistant thought before its next message: in full, or a summary."""

    content: Annotated[str, requests.joined_text(requests.LINE)] = ""
    summary: Annotated[str, requests.joined_text(requests.LINE)] = ""

    @model_validator(mode="before")
    @classmethod
    def _content_or_summary(cls, value: dict[str, Any]) -> dict[str, Any]:
        name = "content" if value.get("content") else "summary"
        return {name: value.get(name) or ""}

    def message(self) -> chat.Message:
        return chat.Message("assistant", [chat.Reasoning(self.content or self.summary)])


class CallItem(Body):
    """A call of the assistant, of any kind of tool that the client runs."""

    model_config = ConfigDict(extra="allow")
    type: str
    call_id: Text
    name: Text = ""
    namespace: Text = ""
    arguments: Any = None

    def message(self) -> chat.Message:
        name, more = self.name or self.type.removesuffix("_call"), self.model_extra or {}
        arguments = {"input": more["input"]} if "input" in more else more.get("action", self.arguments)
        return chat.Message("assistant", [chat.Call.of(self.call_id, flat_name(self.namespace, name), arguments)])


class CallOutputItem(Body):
    """The result of a call."""

    call_id: Text
    output: Annotated[str, requests.joined_text(requests.LINE)]

    @model_validator(mode="before")
    @classmethod
    def _any_output(cls, value: dict[str, Any]) -> dict[str, Any]:
        """The output, or of a tool without one what it has found."""
        found = {name: each for name, each in value.items() if name not in ("call_id", "id", "status", "type")}
        return value if value.get("output") is not None else value | {"output": json.dumps(found, ensure_ascii=False)}

    def message(self) -> chat.Message:
        return chat.Message("tool", [chat.Result(self.call_id, self.output)])


class OtherItem(requests.OtherPart):
    """What OpenAI's servers have done or written, which no prompt has."""

    def message(self) -> chat.Message:
        return chat.Message("assistant", [chat.Text(self.text)])


def _check_item(item: Any) -> Any:
    if not isinstance(item, dict):
        raise FieldError(f"is a JSON {requests.json_kind(item)}: send an object")
    if item.get("type") == "item_reference":
        raise FieldError("is an 'item_reference', and items have no names here: send the item", ".type")
    if _kind(item) == "message":
        requests.check_role(item.get("role"))
    return item


def _kind(item: dict[str, Any]) -> str:
    """What an item is to a conversation."""
    kind = str(item.get("type", "message"))
    if kind in ("message", "reasoning", "function_call", "function_call_output"):
        return kind
    if isinstance(item.get("call_id"), str) and kind.endswith(("_call", "_output")):
        return "function_call_output" if kind.endswith("_output") else "function_call"
    return "other"


Item = Annotated[
    Annotated[MessageItem, Tag(f"{requests.TAG}message")]
    | Annotated[ReasoningItem, Tag(f"{requests.TAG}reasoning")]
    | Annotated[CallItem, Tag(f"{requests.TAG}function_call")]
    | Annotated[CallOutputItem, Tag(f"{requests.TAG}function_call_output")]
    | Annotated[OtherItem, Tag(f"{requests.TAG}other")],
    Discriminator(lambda item: f"{requests.TAG}{_kind(item)}"),
    BeforeValidator(_check_item),
]

# --- requests ---------------------------------------------------------------------------------------------------------


class TextFormat(Body):
    """The field `format` of a tool that takes a text."""

    type: Any = "text"
    syntax: Literal["lark", "regex"] = "lark"
    definition: Text = ""

    @property
    def lark(self) -> str:
        """A Lark grammar of the text; empty for any."""
        if self.syntax == "lark" or not self.definition:
            return self.definition
        return "start: /" + re.sub(r"(\\.)|/", lambda part: part[1] or r"\/", self.definition) + "/"


class FunctionTool(Body):
    """A tool that the client runs.

    Attributes:
        type: "custom" takes a text, its `input`.
        format: of that text.
        namespace: of its name; empty is none.
    """

    type: Literal["function", "custom"]
    name: requests.NonEmptyText
    namespace: Text = ""
    description: Any = None
    parameters: Any = None
    strict: Any = None
    format: TextFormat | None = None

    @property
    def flat_name(self) -> str:
        """The name by which a model calls it."""
        return flat_name(self.namespace, self.name)

    def as_chat(self) -> chat.Tool:
        """The tool of a chat."""
        if self.type == "function":
            return chat.tool(self.flat_name, self.description, self.parameters, self.strict)
        described = str(self.description or "")
        if self.format is not None and self.format.definition:
            described += f"\n\nIts input follows this grammar ({self.format.syntax}):\n{self.format.definition}"
        return chat.tool(self.flat_name, described, TEXT_INPUT)


# The parameters of a tool that takes a text.
TEXT_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def flat_name(namespace: str, name: str) -> str:
    """The name of a tool in a namespace, for models, which know none."""
    return f"{namespace}__{name}" if namespace else name


def _client_tools(tools: Any) -> Any:
    """The tools that clients run, also those in namespaces: without those of OpenAI's servers."""
    if not isinstance(tools, list):
        return tools
    found: list[Any] = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            inner = [
                each | {"namespace": tool.get("name")} if isinstance(each, dict) else each for each in tool["tools"]
            ]
            found += _client_tools(inner)
        elif kind in ("function", "custom") or not isinstance(kind, str):
            found.append(tool)
        else:
            requests.leave_out(f"tools of the type {kind[:80]!r}")
    return found


class Reasoning(Body):
    """The field `reasoning`."""

    effort: requests.Effort | None = None


class TextSettings(Body):
    """The field `text`."""

    format: Annotated[Constraint | None, PlainValidator(requests.parse_response_format)] = None


class StreamOptions(Body):
    """The field `stream_options`, which has no effect."""

    include_obfuscation: bool = False


class ResponseBody(requests.ChatFields):
    """A request for a response."""

    ignored: ClassVar[frozenset[str]] = requests.ChatFields.ignored | {
        *("client_metadata", "context_management", "max_tool_calls", "prompt_cache_options")
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
    tools: Annotated[list[FunctionTool], BeforeValidator(_client_tools)] = Field(default_factory=list, fail_fast=True)
    tool_choice: Annotated[requests.ToolChoice, PlainValidator(requests.parse_tool_choice)] = requests.ToolChoice()
    reasoning: Reasoning = Reasoning()
    text: TextSettings = TextSettings()
    include: list[Any] = Field(default_factory=list)
    stream_options: StreamOptions = StreamOptions()
    truncation: Any = "disabled"
    background: Annotated[Any, requests.unsupported(False)] = None
    conversation: Annotated[Any, requests.unsupported()] = None
    moderation: Annotated[Any, requests.unsupported()] = None
    prompt: Annotated[Any, requests.unsupported()] = None

    def completion_request(self, rules: RequestRules, messages: chat.Messages) -> CompletionRequest:
        """The chat of this body.

        Args:
            messages: of the conversation, without instructions.
        """
        if self.truncation != "disabled":
            rules.unknown.no_effect("truncation", "a conversation that is too long is refused, not cut")
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        tools = [tool.as_chat() for tool in self.tools]
        texts = {tool.flat_name: tool.format.lark for tool in self.tools if tool.format and tool.format.lark}
        response_format = requests.ConstraintField("text.format", self.text.format)
        request = self.chat_request(
            rules, system + messages, tools, self.tool_choice, response_format, self.reasoning.effort, texts
        )
        request.max_tokens = self.max_output_tokens
        request.one_call = not self.parallel_tool_calls
        request.top_logprobs = self.reported_logprobs(bool(LOGPROBS in self.include or self.top_logprobs))
        return request


# --- conversations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conversation:
    """A response, and the messages of the chat up to its end, with the digests of their images."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    nbytes: int
    images: list[str]


class Conversations:
    """Responses in memory, which later requests can continue or read; the least recently used is dropped first.

    Args:
        max_bytes: of all of them, without their images.
        image_bytes: of all images; those in the least recently used conversations are dropped first.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, image_bytes: int = IMAGE_BYTES) -> None:
        self._max_bytes, self._nbytes, self._image_bytes = max_bytes, 0, image_bytes
        self._images: OrderedDict[str, str] = OrderedDict()  # URLs by the digests in their marks
        self._by_id: OrderedDict[str, Conversation] = OrderedDict()

    def keep(self, response: dict[str, Any], messages: list[dict[str, Any]], images: Mapping[str, str]) -> None:
        """Stores a response, unless it is larger than the limit.

        Args:
            images: URLs by the digests in the marks of messages.
        """
        written = json.dumps(messages)
        nbytes = len(json.dumps(response)) + len(written)
        if nbytes > self._max_bytes:
            return
        marked = requests.IMAGE_MARK.findall(written)
        self._by_id[response["id"]] = Conversation(response, messages, nbytes, marked)
        self._nbytes += nbytes
        while self._nbytes > self._max_bytes:
            self._nbytes -= self._by_id.popitem(last=False)[1].nbytes
        for digest in marked:
            if digest in images:
                self._images[digest] = images[digest]
                self._images.move_to_end(digest)
        while sum(map(len, self._images.values())) > self._image_bytes:
            self._images.popitem(last=False)

    def continued(self, name: str) -> list[dict[str, Any]]:
        """The messages up to the end of a response, for the request that is validated.

        Raises:
            ApiError: as `find`.
        """
        conversation = self.find(name, "previous_response_id")
        if not conversation.images:
            return conversation.messages
        messages: list[dict[str, Any]] = json.loads(
            requests.restore_images(json.dumps(conversation.messages), self._images)
        )
        return messages

    def find(self, name: str, param: str | None = None) -> Conversation:
        """A response by its id.

        Raises:
            ApiError: 404, it is not stored, or no longer.
        """
        if name not in self._by_id:
            raise ApiError(
                404, f"there is no response {name[:80]!r} here, or no longer: send the whole conversation", param,
                "previous_response_not_found" if param else None,
            )  # fmt: skip
        self._by_id.move_to_end(name)
        return self._by_id[name]

    def remove(self, name: str) -> None:
        """Raises ApiError, 404, where it is not stored."""
        self._nbytes -= self.find(name).nbytes
        del self._by_id[name]


# --- answers ----------------------------------------------------------------------------------------------------------


class ResponseWriter(OutputWriter):
    """The objects of one response.

    Args:
        fields: of the request.
        messages: of the chat so far, without instructions.
        tools: of the request, by the names by which models call them.
        conversations: where it is stored; None stores it nowhere.
        images: as of `Conversations.keep`.
    """

    def __init__(
        self,
        fields: dict[str, Any],
        messages: list[dict[str, Any]],
        tools: dict[str, FunctionTool],
        model: str,
        conversations: Conversations | None,
        images: Mapping[str, str],
    ) -> None:
        self._messages, self._conversations, self._blocks = messages, conversations, Blocks()
        self._tools, self._images = tools, images
        self._ids: dict[int, str] = {}  # of items, by their index
        self._number = 0  # of events
        self._logprobs: dict[int, list[dict[str, Any]]] = {}  # of texts, by their index
        self._statuses: dict[int, str] = {}  # of items that have ended
        self._truncated = False  # whether the item that ends now is cut at the token limit
        self._pending_logprobs: list[dict[str, Any]] = []  # of tokens with text to come
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        } | {name: fields.get(name, value) for name, value in ECHOED.items()}

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        self.part(choice, choice.answer)
        return self._final(choices)

    def begin(self, choices: Sequence[Choice]) -> bytes:
        response = self._status("in_progress")
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def part(self, choice: Choice, delta: Delta) -> bytes:
        # Log-probabilities of text that is sent now or later: a token may come before its text.
        self._pending_logprobs = [] if delta.reasoning else self._pending_logprobs
        self._pending_logprobs += [chat_logprob(token) for token in delta.content_logprobs]
        data = self._events(self._blocks.add(delta))
        self._pending_logprobs = [] if delta.tool_calls else self._pending_logprobs
        self._truncated = choice.finish_reason == "length"
        return data + self._events(self._blocks.finish()) if choice.finish_reason else data

    def end(self, choices: Sequence[Choice]) -> bytes:
        response = self._final(choices)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        fields = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=self._status("failed") | {"error": fields})

    def _final(self, choices: Sequence[Choice]) -> dict[str, Any]:
        truncated = choices[0].finish_reason == "length"
        response = self._status("incomplete" if truncated else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
            "completed_at": None if truncated else int(time.time()),
            "output": [self._item(block, self._statuses[block.index], block.text) for block in self._blocks.all],
            "usage": _usage(Usage.of(choices)),
        }
        if self._conversations is not None:
            message = chat.Message("assistant", [block.part for block in self._blocks.all])
            self._conversations.keep(response, [*self._messages, *message.as_chat()], self._images)
        return response

    def _status(self, status: str) -> dict[str, Any]:
        empty: dict[str, Any] = {
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        return self._response | empty

    def _item(self, block: Block, status: str, text: str | None) -> dict[str, Any]:
        """An item with a text; without one it has no parts yet."""
        name = self._ids.setdefault(block.index, f"{PREFIXES[block.kind]}_{uuid.uuid4().hex}")
        item = {"id": name, "status": status}
        if block.kind is chat.Call:
            tool = self._tools.get(block.name)
            named = {"call_id": block.call_id, "name": tool.name if tool else block.name}
            named |= {"namespace": tool.namespace} if tool and tool.namespace else {}
            if self._takes_text(block):
                return item | named | {"type": "custom_tool_call", "input": _input(text or "")}
            return item | named | {"type": "function_call", "arguments": text or ""}
        content = [] if text is None else [self._part(block, text)]
        if block.kind is chat.Reasoning:
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _events(self, changes: Iterable[Change]) -> bytes:
        return b"".join(self._change(*change) for change in changes)

    def _change(self, change: Event, block: Block, text: str) -> bytes:
        at: dict[str, Any] = {"output_index": block.index}
        item = self._item(block, "in_progress", None) if change is Event.BEGINS else {}
        of: dict[str, Any] = at | {"item_id": self._ids[block.index]}
        if block.kind is not chat.Call:
            of["content_index"] = 0
        if change is Event.BEGINS:
            data = self._event("response.output_item.added", **at, item=item)
            if block.kind is not chat.Call:
                data += self._event("response.content_part.added", **of, part=self._part(block, ""))
            return data
        if change is Event.GROWS:
            logprobs: dict[str, Any] = {}
            if block.kind is chat.Text:
                logprobs["logprobs"], self._pending_logprobs = self._pending_logprobs, []
                self._logprobs.setdefault(block.index, []).extend(logprobs["logprobs"])
            delta = _input(text) if self._takes_text(block) else text
            return self._event(f"{self._name(block)}.delta", **of, delta=delta, **logprobs)
        self._statuses[block.index] = status = "incomplete" if self._truncated else "completed"
        if self._takes_text(block):
            data = self._event(f"{self._name(block)}.done", **of, input=_input(block.text))
        elif block.kind is chat.Call:
            data = self._event(f"{self._name(block)}.done", **of, name=block.name, arguments=block.text)
        else:
            logprobs = {"logprobs": self._logprobs.get(block.index, [])} if block.kind is chat.Text else {}
            data = self._event(f"{self._name(block)}.done", **of, text=block.text, **logprobs)
            data += self._event("response.content_part.done", **of, part=self._part(block, block.text))
        return data + self._event("response.output_item.done", **at, item=self._item(block, status, block.text))

    def _takes_text(self, block: Block) -> bool:
        """Whether a block is a call of a custom tool. Calls come as a whole."""
        tool = self._tools.get(block.name) if block.kind is chat.Call else None
        return tool is not None and tool.type == "custom"

    def _name(self, block: Block) -> str:
        """Of the events in which it grows."""
        names = {chat.Call: "function_call_arguments", chat.Text: "output_text", chat.Reasoning: "reasoning_text"}
        return f"response.{'custom_tool_call_input' if self._takes_text(block) else names[block.kind]}"

    def _part(self, block: Block, text: str) -> dict[str, Any]:
        if block.kind is chat.Reasoning:
            return {"type": "reasoning_text", "text": text}
        logprobs = self._logprobs.get(block.index, []) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _event(self, kind: str, **data: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **data}, kind)


def _input(arguments: str) -> str:
    """The text that a custom tool takes: of its arguments, or what was written instead."""
    text = (chat.parse_arguments(arguments) or {}).get("input")
    return text if isinstance(text, str) else arguments


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.generated,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt_tokens + usage.generated,
    }


# --- the dialect ------------------------------------------------------------------------------------------------------


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
        messages = [] if before is None else self._conversations.continued(before)
        messages = messages + as_messages(parsed.input)
        request = parsed.completion_request(rules, messages)
        conversations = self._conversations if parsed.store else None
        echoed = {name: value for name, value in body.items() if value is not None and name != "truncation"}
        tools = {tool.flat_name: tool for tool in parsed.tools}
        kept = echoed, messages, tools
        images = requests.collected_images()
        return ParsedRequest(request, lambda model: ResponseWriter(*kept, model, conversations, images))


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
