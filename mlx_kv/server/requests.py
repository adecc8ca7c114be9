"""Request bodies as pydantic models, the fields that all APIs share, and the request that every body becomes.

A boolean is not a number, a number is not a string, and null is the same as a field that is left out. A field is
honoured, ignored because it has no effect on the tokens, or refused: a known field that cannot be honoured. Unknown
fields are left to `UnknownFields`. Fields of structured output are OpenAI's, and those of llama-server and vLLM with
the same meaning; invalid schemas and grammars are found when they are compiled.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationError,
    WrapValidator,
    create_model,
    model_validator,
)

from mlx_kv.files.tensor_files import read_json
from mlx_kv.generation import grammar as grammars
from mlx_kv.generation.embedding import Pooling
from mlx_kv.generation.encoding import NOT_FOR_TEMPLATES
from mlx_kv.generation.grammar import Constraint
from mlx_kv.generation.images import GONE, MAX_IMAGES
from mlx_kv.generation.sampling import derived_seed
from mlx_kv.generation.settings import MIN_PENALTY, SamplingSettings
from mlx_kv.server.chat import Messages, Tool
from mlx_kv.server.json_http import ApiError, sendable
from mlx_kv.settings import settings_of

# Fields whose errors name the place within them as `param`; errors of other fields name the field.
LOCATED = {"cache", "input", "messages", "reasoning", "text"}
NO_UNICODE = "is not valid Unicode: remove the half of a surrogate pair"
TAG = "type="  # how tags of tagged unions begin, which pydantic adds to the location of an error
JSON_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
MAX_LOGGED = 256  # names of unknown fields: clients that make up more of them do not fill the log
log = logging.getLogger("mlx_kv.server")
EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "an array",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_too_short": "a text",
    "string_type": "a string",
}


class UnknownFields:
    """What is done about unknown fields, for all requests to a server: a line in the log for each name, or a refusal.

    Args:
        strict: whether requests with unknown fields are refused.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._logged: set[str] = set()

    def check(self, names: Iterable[str]) -> None:
        """Raises ApiError, 400, for the first of them where they are refused."""
        for name in sorted(names):
            if self.strict:
                raise ApiError(400, f"unknown field {name[:80]!r}: leave it out", name[:80], "unknown_parameter")
            self.log_once(
                name, f"requests have an unknown field {name[:80]!r}: it is ignored; --strict refuses such requests"
            )

    def no_effect(self, name: str, reason: str) -> None:
        """Raises ApiError, 400, for a known field without effect, where such are refused."""
        if self.strict:
            raise ApiError(400, f"{reason}: leave it out", name, "unsupported_parameter")
        self.log_once(name, f"requests have {name}, which has no effect: {reason}; --strict refuses such requests")

    def log_once(self, name: str, line: str) -> None:
        """Logs a line, if none was logged for that name before."""
        if name not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(name)
            log.warning("%s", line)


_left_out = UnknownFields()  # of all requests


def leave_out(what: str, why: str = "this server has none") -> None:
    """Logs what requests have and no prompt: once."""
    _left_out.log_once(what, f"requests have {what}, which are left out: {why}")


class FieldError(ValueError):
    """Raised by validators for a value that is not accepted.

    Args:
        message: continues the name of the field: "is empty: send a pattern".
        at: the place within the field, such as ".role" or "[0]".
        code: OpenAI's error code.
    """

    def __init__(self, message: str, at: str = "", code: str | None = None) -> None:
        super().__init__(sendable(message))
        self.at, self.code = at, code


class Body(BaseModel):
    """A request body, or an object in one."""

    model_config = ConfigDict(strict=True, frozen=True)
    ignored: ClassVar[frozenset[str]] = frozenset()  # fields that are accepted and have no effect

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value

    @classmethod
    def parse(cls, body: Any, unknown: UnknownFields) -> Self:
        """Validates the JSON of a body.

        Raises:
            ApiError: 400, for a value that is not accepted, or an unknown field where those are refused.
        """
        if not isinstance(body, dict):
            raise ApiError(400, f"the body is a JSON {json_kind(body)}: send an object")
        unknown.check(name for name in body.keys() - cls.model_fields.keys() - cls.ignored if body[name] is not None)
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise _api_error(error, cls) from None


def json_kind(value: Any) -> str:
    """The JSON type of a value."""
    return JSON_KINDS.get(type(value), "number")


def _api_error(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """The first of pydantic's errors, as clients get it."""
    first = error.errors(include_url=False)[0]
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    path = [each for each in first["loc"] if not str(each).startswith(TAG)]
    name = str(path[0])
    expected = model.model_fields[name].description
    if name in LOCATED:
        expected = expected if len(path) == 1 else None
    elif expected:  # of a union, whose alternatives pydantic adds to the location
        path = [name, *takewhile(lambda each: isinstance(each, int), path[1:])]
    where = name + "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path[1:])
    code = None
    if kind == "string_unicode":
        message = f"{where} {NO_UNICODE}"
    elif kind == "value_error":
        refused: FieldError = context["error"]
        where, code = where + refused.at, refused.code
        message = f"{where} {refused}"
    elif kind == "missing":
        message = f"{where} is missing: send {expected or 'it'}"
    else:
        message = f"{where} {_problem(kind, value, context)}: send {expected or _expected(kind, context)}"
    return ApiError(400, message, where[:200] if name in LOCATED else name, code)


def _problem(kind: str, value: Any, context: dict[str, Any]) -> str:
    if kind == "too_long":
        return f"has {len(value):,} elements"
    if kind in ("too_short", "string_too_short"):
        return "is empty"
    if kind == "literal_error" and isinstance(value, str):
        return f"is {value[:80]!r}"
    return f"is {str(value)[:40]}" if json_kind(value) == "number" else f"is a JSON {json_kind(value)}"


def _expected(kind: str, context: dict[str, Any]) -> str:
    for bound, words in (("ge", "at least"), ("le", "at most"), ("max_length", "at most"), ("min_length", "at least")):
        if bound in context and kind not in EXPECTED:
            limit = context[bound]
            return f"{words} {limit:,}" if isinstance(limit, int) else f"{words} {limit:g}"
    if kind == "literal_error":
        expected = context["expected"].replace("'", "")
        return f"one of {expected}".replace(" or ", ", ") if " or " in expected else str(expected)
    return EXPECTED.get(kind, "another value")


# --- types of fields --------------------------------------------------------------------------------------------------

ROLES = ("assistant", "developer", "function", "system", "tool", "user")
TEXT_KINDS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
PART_NOUNS = {  # by their types in all dialects
    **dict.fromkeys(("image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("input_audio", "audio_url"), "audio"),
    **dict.fromkeys(("input_file", "document"), "file"),
    "video_url": "video",
    "None": "part",
}
LINE = "\n"  # between the parts of a content that are paragraphs
IMAGE_HEAD = 2**18  # characters of an image's base64, a multiple of 4, in which its size is looked for


def unicode_text(value: str) -> str:
    """The text. Raises `FieldError` for one that UTF-8 cannot represent."""
    try:
        value.encode("utf-8")
    except UnicodeError:
        raise FieldError(NO_UNICODE) from None
    return value


def _same(value: Any, validate: Callable[[Any], Any]) -> Any:
    validate(value)
    return value


Text = Annotated[str, StringConstraints(min_length=0)]  # with a bound, pydantic checks that it is valid Unicode
NonEmptyText = Annotated[str, StringConstraints(min_length=1)]
# Validated, and then used as it was sent: chat templates read more fields than these, in the order of the client.
Unchanged = WrapValidator(_same)
OneOrMore = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


def unsupported(*accepted: Any) -> BeforeValidator:
    """A field that is not supported: accepted with values that have the same meaning as no value."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(each) and value == each for each in accepted):
            raise FieldError("is not supported by this server: leave it out", code="unsupported_parameter")
        return value

    return BeforeValidator(check)


def read_parts(parts: Sequence[Any], gap: str = "", located: bool = True) -> str:
    """The text of a content, which is a list of parts.

    Args:
        gap: between two parts.
        located: whether an error names the place of the part.
    """
    texts = []
    for index, part in enumerate(parts):
        try:
            texts.append(part_text(part))
        except FieldError as error:
            error.at = f"[{index}]{error.at}" if located else ""
            raise
    return gap.join(texts)


def part_text(part: Any) -> str:
    """The text of a part; of one without a text, what it is: it would otherwise end a conversation that has it."""
    if not isinstance(part, dict):
        raise FieldError(f"is a JSON {json_kind(part)}: send a part, which is an object")
    kind, source = str(part.get("type")), part.get("source")
    for name in ("text", "thinking", "refusal"):
        if isinstance(text := part.get(name), str):
            return unicode_text(text)
    if kind in TEXT_KINDS:
        raise FieldError("has no text: send one")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return unicode_text(str(source.get("data")))
    if isinstance(content := part.get("content"), list) and kind == "search_result":
        return unicode_text(f"{part.get('title')}\n{part.get('source')}\n{read_parts(content, LINE)}")
    noun = PART_NOUNS.get(kind, kind.replace("_", " ")[:40])
    if noun == "image" and (kept := _images.get()) is not None:
        return _keep_image(part, *kept)
    leave_out(f"parts of the kind {noun!r}", "this model reads text")
    width, height = image_size(part) if noun == "image" else (0, 0)
    size = f", {width:,} by {height:,} pixels" if width else ""
    return unicode_text(f"[{noun}{size}, not shown: this model reads text]")


class OtherPart(Body):
    """An object in a conversation that has no text, such as an image: the conversation says what it was."""

    text: str

    @model_validator(mode="before")
    @classmethod
    def _describe(cls, value: Any) -> Any:
        return {"text": part_text(value)}


def image_size(part: Mapping[str, Any]) -> tuple[int, int]:
    """Width and height of an image in a part; zeros where they are unknown: by its URL alone, or without Pillow."""
    data = image_url(part).partition(";base64,")[2]
    with contextlib.suppress(Exception):  # Pillow raises what it likes, also of images that say they are huge
        from PIL import Image

        head = base64.b64decode(str(data)[:IMAGE_HEAD], validate=True)
        return Image.open(io.BytesIO(head)).size  # reads the header alone
    return 0, 0


def image_url(part: Mapping[str, Any]) -> str:
    """The URL of an image in a part, a data URL where it brings its content; empty where it has neither."""
    image, source = part.get("image_url"), part.get("source")
    url = image.get("url") if isinstance(image, dict) else image
    if isinstance(source, dict):
        data = source.get("data")
        url = f"data:{source.get('media_type')};base64,{data}" if data is not None else source.get("url")
    return url if isinstance(url, str) else ""


# --- images -----------------------------------------------------------------------------------------------------------
#
# A content is a text in all that becomes of it, up to the text of the prompt: an image is a mark there, which no client
# can write, since it has a number that this process has drawn. Templates may write results of calls as JSON: the mark
# has no character that JSON escapes.

_drawn = secrets.token_hex(8)
IMAGE_MARK = re.compile(f"image-{_drawn}-([0-9a-f]{{64}})")
_images: ContextVar[tuple[dict[str, str], bool] | None] = ContextVar("images", default=None)


@contextlib.contextmanager
def collect_images(wanted: bool, fetches: bool = False) -> Iterator[dict[str, str]]:
    """Collects the images of the request that is validated within: URLs by the digest in their marks.

    Args:
        wanted: whether the model reads images; else the text says what they were.
        fetches: whether a URL may be another one than a data URL.
    """
    images: dict[str, str] = {}
    token = _images.set((images, fetches) if wanted else None)
    try:
        yield images
    finally:
        _images.reset(token)


def _keep_image(part: Mapping[str, Any], images: dict[str, str], fetches: bool) -> str:
    """The mark of an image."""
    url = image_url(part)
    if not url.startswith(("data:", *(("http://", "https://") if fetches else ()))):
        what = "is an image by its URL" if url else "is an image without its content"
        raise FieldError(f"{what}, and this server fetches none: send data:image/png;base64,…")
    digest = hashlib.sha256(url.encode("utf-8", "replace")).hexdigest()
    images[digest] = url
    if len(images) > MAX_IMAGES:
        raise FieldError(f"is one image too many: a request has at most {MAX_IMAGES} different ones")
    return f"image-{_drawn}-{digest}"


def collected_images() -> Mapping[str, str]:
    """URLs of the images of the request that is validated, so far; none where the model reads none."""
    kept = _images.get()
    return {} if kept is None else kept[0]


def restore_images(text: str, urls: Mapping[str, str]) -> str:
    """A text of an earlier request, with its images added to those of the request that is validated.

    Args:
        urls: of images by the digests in their marks; a note stands for others, and for all where the model reads none.
    """
    images, _ = _images.get() or (None, False)

    def restored(mark: re.Match[str]) -> str:
        if images is None or mark[1] not in urls or len(images) >= MAX_IMAGES:
            return GONE
        images[mark[1]] = urls[mark[1]]
        return mark[0]

    return IMAGE_MARK.sub(restored, text)


def joined_text(gap: str = "") -> BeforeValidator:
    """A field with a text, or a list of parts, as one text.

    Args:
        gap: between two parts.
    """

    def join(value: Any) -> str:
        if isinstance(value, str):
            return unicode_text(value)
        if not isinstance(value, list):
            raise FieldError(f"is a JSON {json_kind(value)}: send a text, or a list of parts")
        return read_parts(value, gap)

    return BeforeValidator(join)


def check_role(role: Any) -> Any:
    """The role of a message."""
    if not isinstance(role, str):
        raise FieldError("has no role: send one")
    if role not in ROLES:
        raise FieldError(f"is {role[:80]!r}: send one of {', '.join(ROLES)}", ".role")
    return role


# --- structured output ------------------------------------------------------------------------------------------------

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class ConstraintField(NamedTuple):
    """The constraint on the answers of a request, and the field that has it."""

    name: str = ""
    constraint: Constraint | None = None


def _schema(value: Any) -> Constraint:
    return grammars.json_schema(_parsed_schema(value))


def _parsed_schema(value: Any) -> Any:
    """A JSON schema, which some clients send as a string."""
    if isinstance(value, str):
        try:
            value = read_json(value)
        except ValueError as error:
            raise FieldError(f"is not JSON: {error}"[:300]) from None
    if not isinstance(value, dict):
        raise FieldError(f"is a JSON {json_kind(value)}: send a schema, which is an object")
    return value


def parse_response_format(value: Any) -> Constraint | None:
    """OpenAI's field, of chats or of responses, and llama-server's. Raises `FieldError`."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":  # llama-server's may have a schema
        return _schema(value["schema"]) if value.get("schema") else grammars.json_object()
    if kind == "json_schema":
        definition = value.get("json_schema", value)  # the second is the form of the Responses API
        if not isinstance(definition, dict) or definition.get("schema") is None:
            raise FieldError("has no schema in json_schema: send one")
        strict = definition.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise FieldError(f"has a JSON {json_kind(strict)} as json_schema.strict: send true or false")
        return grammars.json_schema(_parsed_schema(definition["schema"]), lenient=not strict)
    if kind in ("regex", "grammar") and isinstance(value.get(kind), str):
        return ConstraintFields.parse({kind: value[kind]}, UnknownFields()).constraint_field().constraint
    raise FieldError("is not an object with a type of text, json_object or json_schema: send one")


def _structured_outputs(value: Any) -> Constraint | None:
    """vLLM's field: other constraint fields in one object, with errors of those fields."""
    if not isinstance(value, dict):
        raise FieldError(f"is a JSON {json_kind(value)}: send an object")
    outputs = {name: each for name, each in value.items() if each is not None}
    if unknown := outputs.keys() - IN_STRUCTURED_OUTPUTS.keys():
        raise FieldError(f"has {min(unknown)[:80]!r}, which is not supported: leave it out")
    fields = {IN_STRUCTURED_OUTPUTS[name]: each for name, each in outputs.items()}
    return ConstraintFields.parse(fields, UnknownFields()).constraint_field().constraint


IN_STRUCTURED_OUTPUTS = {"json": "guided_json", "regex": "regex", "choice": "guided_choice", "grammar": "grammar"}
# A schema, pattern, grammar or list of texts in a request, as a constraint.
Schema = Annotated[Any, PlainValidator(_schema)]
Regex = Annotated[NonEmptyText, AfterValidator(grammars.regex)]
# Clients of llama-server send an empty grammar for none.
GrammarText = Annotated[Text, AfterValidator(lambda text: grammars.grammar(text) if text else None)]
Choice = Annotated[list[Text], Field(min_length=1, fail_fast=True), AfterValidator(grammars.choice)]


class ConstraintFields(Body):
    """The fields, as constraints on the answer."""

    structured_outputs: Annotated[Any, PlainValidator(_structured_outputs)] = None
    json_schema: Schema = None  # llama-server's
    regex: Regex | None = None
    grammar: GrammarText | None = None
    guided_json: Schema = None  # vLLM's before structured_outputs
    guided_regex: Regex | None = None
    guided_grammar: GrammarText | None = None
    guided_choice: Choice | None = None

    def constraint_field(self, response_format: ConstraintField | None = None) -> ConstraintField:
        """The field that has a constraint.

        Args:
            response_format: a further field, with a name that depends on the API.

        Raises:
            ApiError: 400, for more than one.
        """
        values = ((name, getattr(self, name)) for name in ConstraintFields.model_fields)
        constraints = [ConstraintField(name, constraint) for name, constraint in values if constraint is not None]
        if response_format is not None and response_format.constraint is not None:
            constraints.append(response_format)
        if len(constraints) > 1:
            first, second, *_ = sorted(each.name for each in constraints)
            raise ApiError(400, f"{first} and {second} both constrain the answer: send one", second)
        return constraints[0] if constraints else ConstraintField()


class ToolChoice(NamedTuple):
    """Which tools an answer calls: "auto", "none", "required", or "function" for the one with this name."""

    kind: str = "auto"
    name: str = ""

    def constraint(self, tools: Sequence[Tool], texts: Mapping[str, str]) -> Constraint | None:
        """The constraint on the answer to a chat with these tools.

        Args:
            texts: Lark grammars of what functions take, by name, for those that take a text.

        Raises:
            ApiError: 400, the function is not among the tools.
        """
        auto = self.kind == "auto"
        if self.kind == "none" or (auto and not texts):
            return None
        functions = [tool["function"] for tool in tools]
        if self.kind == "function":
            functions = [function for function in functions if function["name"] == self.name]
            if not functions:
                message = f"tool_choice names {self.name[:80]!r}, which is not among tools: add it to them"
                raise ApiError(400, message, "tool_choice")
        if not functions:
            raise ApiError(400, "tool_choice requires a call, and there are no tools: send some", "tool_choice")
        called = []
        for function in functions:
            name, parameters = function["name"], _of_object(function.get("parameters") or NO_ARGUMENTS)
            if auto and name not in texts:
                parameters = {"type": "object"}  # which the model writes as it likes
            strict = function.get("strict") is True
            called.append(grammars.Function(name, parameters, not strict, texts.get(name, "")))
        return grammars.calls(called, auto)


def _of_object(parameters: Any) -> Any:
    """A schema of arguments, which are an object also where it does not say so."""
    kinds = {"type", "$ref", "allOf", "anyOf", "oneOf"}
    return (
        parameters if not isinstance(parameters, dict) or kinds & parameters.keys() else parameters | {"type": "object"}
    )


def parse_tool_choice(value: Any) -> ToolChoice:
    """OpenAI's field, of chats or of responses. Raises `FieldError`."""
    if value in ("auto", "none", "required"):
        return ToolChoice(value)
    if isinstance(value, dict) and value.get("type") in ("function", "custom"):
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return ToolChoice("function", name)
    named = '{"type": "function", "function": {"name": ...}}'
    raise FieldError(f'is none of "auto", "none", "required" and {named}: send one')


# --- requests ---------------------------------------------------------------------------------------------------------

MAX_STOPS = 16
MAX_TOKENS = 1 << 24
MAX_BIASES, MAX_BIAS = 1024, 100.0
MAX_TOP_LOGPROBS = 20
Prompt = str | list[int]
Vectors = Sequence[np.ndarray[Any, np.dtype[np.float32]]]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
StopList = Annotated[
    list[NonEmptyText],
    Field(max_length=MAX_STOPS, fail_fast=True, description=f"at most {MAX_STOPS} texts that are not empty"),
]
ThinkingBudget = Annotated[int | None, Field(ge=0, le=MAX_TOKENS)]
TokenLimit = Annotated[int | None, Field(ge=1, le=MAX_TOKENS)]


# Cache settings that requests could choose before 0.4, and the options for them.
CACHE_OPTIONS = {"bits": "--kv-bits", "budget": "--kv-budget", "score": "--kv-score"}


class CacheRequest(Body):
    """The field `cache`.

    Attributes:
        keep: whether the keys and values of prompt and answer are cached for other requests.
    """

    keep: bool = True

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        for name in sorted(value.keys() - cls.model_fields.keys()) if isinstance(value, dict) else ():
            if value[name] is not None and (option := CACHE_OPTIONS.get(name)):
                problem = f"is no longer a setting of requests: start a server with {option}"
                raise FieldError(problem, f".{name}", "unsupported_parameter")
            if value[name] is not None:
                raise FieldError("is unknown: leave it out", f".{name[:80]}", "unknown_parameter")
        return value


AS_SERVED = CacheRequest()


@dataclass
class CompletionRequest:
    """A validated request. The model of its body makes it, and nothing changes it afterwards.

    Attributes:
        prompts: texts or token ids, each of which gets answers; none for a chat.
        messages, tools, template: of a chat; template are arguments for the chat template.
        hints: arguments for the chat template, where the model has one.
        roles: prefixes of messages by role, for a model without a chat template; empty is mlx-lm's.
        continues: whether the answer continues the last message, which is the assistant's.
        one_call: whether an answer has at most one tool call.
        echo: whether an answer begins with its prompt.
        max_tokens: None is the server's.
        n: answers to each prompt.
        top_logprobs: how many likeliest tokens are reported with each token; None reports no log-probabilities at all.
        stop_strings: strings at which the answer ends.
        constraint: structured output; None is none.
        constraint_field: the field that has it.
        cache: how its keys and values are stored.
        thinking_budget: tokens of thinking; None is by `effort`, or the server's.
        effort: of reasoning, as clients name it.
        images: URLs, or what was fetched from them, by the digests in the marks that stand for them in messages.
    """

    model: str | None = None
    prompts: Sequence[Prompt] = ()
    messages: Messages = field(default_factory=list)
    tools: Sequence[Any] = ()
    template: dict[str, Any] = field(default_factory=dict)
    hints: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    one_call: bool = False
    continues: bool = False
    echo: bool = False
    max_tokens: int | None = None
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    n: int = 1
    top_logprobs: int | None = None
    stop_strings: tuple[str, ...] = ()
    constraint: Constraint | None = None
    constraint_field: str = ""
    stream: bool = False
    include_usage: bool = False
    cache: CacheRequest = AS_SERVED
    thinking_budget: int | None = None
    effort: str | None = None
    images: Mapping[str, str | bytes] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        return not self.prompts

    @property
    def beginning(self) -> str:
        """The text of the message that the answer continues."""
        content = self.messages[-1]["content"] if self.continues else ""
        return "".join([part.get("text", "") for part in content]) if isinstance(content, list) else content or ""

    @property
    def forces_call(self) -> bool:
        """Whether the answer has to be a tool call."""
        return self.constraint is not None and self.constraint.kind == "calls"

    @property
    def may_call(self) -> bool:
        """Whether an answer may be a tool call or follow the constraint."""
        return bool(self.tools) and not self.forces_call

    @property
    def answers(self) -> int:
        """The number of answers."""
        return max(1, len(self.prompts)) * self.n

    def sampling_of(self, index: int) -> SamplingSettings:
        """The settings of one of the answers to a prompt; each has a seed derived from the request's."""
        seed = self.sampling.seed
        return self.sampling if seed is None or index == 0 else replace(self.sampling, seed=derived_seed(seed, index))


@dataclass(frozen=True)
class EmbeddingRequest:
    """A validated request for embeddings.

    Attributes:
        inputs: texts or token ids, one or more.
        answer: the response, given the model's name, the vectors and the number of tokens.
        dimensions: first numbers of each vector that are wanted, normalised again; None is all.
        pooling: instead of the model's own.
        kind: of the texts, for which the model's card may have an instruction.
        truncate: whether texts that are too long are cut, instead of being refused.
        keep_alive: as of `Served.keep_alive`.
    """

    inputs: Sequence[str | list[int]]
    answer: Callable[[str, Vectors, int], dict[str, Any]]
    dimensions: int | None = None
    pooling: Pooling | None = None
    kind: str | None = None
    truncate: bool = False
    keep_alive: float | None = None


@dataclass(frozen=True)
class Limits:
    """Limits of requests, and the operator's settings for them.

    Attributes:
        body_bytes: maximum size of a body.
        image_body_bytes: the same on a server with a model that reads images.
        body_seconds: time for a body to arrive.
        prompt_tokens: maximum length of a prompt; None is the context of the model, less one.
        queue: answers that wait for a row; further requests are refused.
        max_tokens: for requests that leave it out.
        answer_tokens: of an answer at most, whatever the request says; None is no limit.
        answers: to one request; None are as many as rows and queue have room for.
        strict: whether requests with unknown fields are refused.
        template: settings of the chat template, for requests that leave them out.
        client_headers: whether lines that clients write for their own servers stay in prompts.
        thinking_budget: tokens of thinking, for requests that do not say how many; None is no limit.
        thinking_closing: text that comes where a limit ends thinking, before the model's mark.
        fetch_image: the content that an image's URL has, of so many bytes at most; None where none is fetched.
    """

    body_bytes: int = 4 * 2**20
    image_body_bytes: int = 32 * 2**20
    body_seconds: float = 60.0
    prompt_tokens: int | None = None
    queue: int = 64
    max_tokens: int = 512
    answer_tokens: int | None = None
    answers: int | None = None
    strict: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    client_headers: bool = False
    thinking_budget: int | None = None
    thinking_closing: str = ""
    fetch_image: Callable[[str, int], bytes] | None = None


@dataclass(frozen=True)
class RequestRules:
    """The settings for requests to a model: sampling by default, unknown fields, and `Limits.client_headers`.

    Attributes:
        has_template: whether the model has a chat template.
    """

    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    unknown: UnknownFields = field(default_factory=UnknownFields)
    client_headers: bool = False
    has_template: bool = True


def _penalty(value: float | None) -> float | None:
    if value is not None and 0 < value < MIN_PENALTY:
        raise FieldError(f"is {value}: send 0, or at least {MIN_PENALTY}")
    return value


def _biases(biases: dict[str, Any] | None) -> tuple[tuple[int, float], ...] | None:
    """Pairs of a token id and its bias."""
    if biases and len(biases) > MAX_BIASES:
        raise FieldError(f"has {len(biases):,} tokens: send at most {MAX_BIASES:,}")
    pairs = []
    for name, value in (biases or {}).items():
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise FieldError(f"has the key {name[:80]!r}: send ids of tokens")
        if type(value) not in (int, float) or not -MAX_BIAS <= value <= MAX_BIAS:
            raise FieldError(f"is not a number from {-MAX_BIAS:g} to {MAX_BIAS:g}: send one", f"[{name}]")
        pairs.append((int(name), float(value)))
    return tuple(pairs) or None


# A field for each sampling setting, with its bounds in requests.
SAMPLING_FIELDS: dict[str, Any] = {
    name: (described.kind | None, Field(default=None, ge=described.served[0], le=described.served[1]))
    for name, described in settings_of(SamplingSettings).items()
    if described.served is not None
}
_number, _bounds = SAMPLING_FIELDS["repetition_penalty"]
SAMPLING_FIELDS["repetition_penalty"] = Annotated[_number, AfterValidator(_penalty)], _bounds
SAMPLING_FIELDS["logit_bias"] = Annotated[dict[str, Any] | None, AfterValidator(_biases)], None
if TYPE_CHECKING:
    SamplingFields = ConstraintFields
else:
    SamplingFields = create_model("SamplingFields", __base__=ConstraintFields, **SAMPLING_FIELDS)


class GenerationBody(SamplingFields):
    """The fields that all APIs share besides sampling: most are OpenAI's, mlx_lm.server's and llama-server's."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            *("id_slot", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"),
            *("store", "user", "verbosity"),
        }
    )
    model: str | None = None
    stream: bool = False
    stop: Annotated[StopList, OneOrMore] = Field(default_factory=list)
    cache: CacheRequest = AS_SERVED
    adapters: Annotated[Any, unsupported()] = None
    suffix: Annotated[Any, unsupported("")] = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    def request(self, rules: RequestRules, response_format: ConstraintField | None = None) -> CompletionRequest:
        """These fields, as a request without a prompt.

        Args:
            response_format: the constraint of a field that only some APIs have.
        """
        changes = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if changes.get("top_k") == -1:  # as some clients write "all"
            changes["top_k"] = 0
        if changes.get("seed", 0) < 0:  # as clients write a random one
            changes["seed"] = None
        constraint = self.constraint_field(response_format)
        return CompletionRequest(
            model=self.model,
            stream=self.stream,
            stop_strings=tuple(self.stop),
            cache=self.cache,
            sampling=replace(rules.sampling, **changes) if changes else rules.sampling,
            constraint=constraint.constraint,
            constraint_field=constraint.name,
        )

    def reported_logprobs(self, logprobs: bool) -> int | None:
        """How many likeliest tokens are reported with each token; None reports no log-probabilities.

        Args:
            logprobs: whether they are asked for, besides by `top_logprobs`.
        """
        if self.top_logprobs and not logprobs:
            raise ApiError(400, "top_logprobs is only for logprobs=true: send both, or none", "top_logprobs")
        return (self.top_logprobs or 0) if logprobs else None


def _template_settings(settings: dict[str, Any]) -> dict[str, Any]:
    if reserved := settings.keys() & (NOT_FOR_TEMPLATES | {"tools"}):
        raise FieldError(f"cannot set {min(reserved)}: leave it out")
    return settings


class ChatFields(GenerationBody):
    """The fields that all APIs of chats share."""

    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_settings)] = Field(default_factory=dict)
    continue_final_message: bool = False
    enable_thinking: bool | None = None
    thinking_budget: ThinkingBudget = None
    max_thinking_tokens: ThinkingBudget = None  # another name of it

    def chat_request(
        self,
        rules: RequestRules,
        messages: Messages,
        tools: Sequence[Tool],
        tool_choice: ToolChoice,
        response_format: ConstraintField,
        effort: Effort | None,
        texts: Mapping[str, str] = MappingProxyType({}),
    ) -> CompletionRequest:
        """A request with these fields.

        Args:
            tools, tool_choice, response_format, effort: as fields of OpenAI's chats.
            texts: as of `ToolChoice.constraint`.
        """
        request = self.request(rules, response_format)
        call = tool_choice.constraint(tools, texts)
        if call is not None and (call.kind == "calls" or request.constraint is None):
            # A response_format is the form of texts, and a call is none.
            if request.constraint_field not in ("", response_format.name):
                other = request.constraint_field
                raise ApiError(400, f"tool_choice and {other} both constrain the answer: send one", other)
            request.constraint, request.constraint_field = call, "tools"
        if self.continue_final_message and (messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls")):
            needed = "a last message of the assistant without tool calls"
            raise ApiError(400, f"continue_final_message needs {needed}: send one", "continue_final_message")
        thinks = False if effort == "none" and self.enable_thinking is None else self.enable_thinking
        budget = self.max_thinking_tokens if self.thinking_budget is None else self.thinking_budget
        request.messages, request.thinking_budget, request.effort = messages, budget, effort
        request.tools = [] if tool_choice.kind == "none" else tools
        request.template = self.chat_template_kwargs
        if thinks is not None:
            request.hints["enable_thinking"] = thinks
        if effort not in (None, "none"):
            request.hints["reasoning_effort"] = effort
        request.continues = self.continue_final_message
        return request
