"""Structured output: its request fields, tools that an answer has to call, and their grammars.

The fields are OpenAI's, and those of llama-server and vLLM with the same meaning. Invalid schemas and grammars are
found when they are compiled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

from mlx_lm.tool_parsers import json_tools
from pydantic import AfterValidator, Field, PlainValidator

from mlx_kv.files.decoding import read_json
from mlx_kv.generation.grammar import (
    CallMarks,
    Constraint,
    Function,
    Grammar,
    GrammarCompiler,
    GrammarError,
    GrammarProcessor,
    LeadIn,
    calls,
    choice,
    grammar,
    json_object,
    json_schema,
    regex,
)
from mlx_kv.server.chat import Tool
from mlx_kv.server.errors import ApiError, without_panic
from mlx_kv.server.fields import Body, FieldError, NonEmptyText, Text, UnknownFields, json_kind

COMPILE_SECONDS = 10.0
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class ConstraintField(NamedTuple):
    """The constraint on the answers of a request, and the field that has it."""

    name: str = ""
    constraint: Constraint | None = None


def _schema(value: Any) -> Constraint:
    return json_schema(_parsed_schema(value))


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
        return _schema(value["schema"]) if value.get("schema") else json_object()
    if kind == "json_schema":
        given = value.get("json_schema", value)  # the second is the form of the Responses API
        if not isinstance(given, dict) or given.get("schema") is None:
            raise FieldError("has no schema in json_schema: send one")
        strict = given.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise FieldError(f"has a JSON {json_kind(strict)} as json_schema.strict: send true or false")
        return json_schema(_parsed_schema(given["schema"]), lenient=not strict)
    if kind in ("regex", "grammar") and isinstance(value.get(kind), str):
        return ConstraintFields.parse({kind: value[kind]}, UnknownFields()).constraint_field().constraint
    raise FieldError("is not an object with a type of text, json_object or json_schema: send one")


def _structured_outputs(value: Any) -> Constraint | None:
    """vLLM's field: other constraint fields in one object, with errors of those fields."""
    if not isinstance(value, dict):
        raise FieldError(f"is a JSON {json_kind(value)}: send an object")
    given = {name: each for name, each in value.items() if each is not None}
    if unknown := given.keys() - IN_STRUCTURED_OUTPUTS.keys():
        raise FieldError(f"has {min(unknown)[:80]!r}, which is not supported: leave it out")
    fields = {IN_STRUCTURED_OUTPUTS[name]: each for name, each in given.items()}
    return ConstraintFields.parse(fields, UnknownFields()).constraint_field().constraint


IN_STRUCTURED_OUTPUTS = {"json": "guided_json", "regex": "regex", "choice": "guided_choice", "grammar": "grammar"}
# A schema, pattern, grammar or list of texts in a request, as a constraint.
Schema = Annotated[Any, PlainValidator(_schema)]
Regex = Annotated[NonEmptyText, AfterValidator(regex)]
# Clients of llama-server send an empty grammar for none.
GrammarText = Annotated[Text, AfterValidator(lambda text: grammar(text) if text else None)]
Choice = Annotated[list[Text], Field(min_length=1, fail_fast=True), AfterValidator(choice)]


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
        given = ((name, getattr(self, name)) for name in ConstraintFields.model_fields)
        found = [ConstraintField(name, constraint) for name, constraint in given if constraint is not None]
        if response_format is not None and response_format.constraint is not None:
            found.append(response_format)
        if len(found) > 1:
            first, second, *_ = sorted(each.name for each in found)
            raise ApiError(400, f"{first} and {second} both constrain the answer: send one", second)
        return found[0] if found else ConstraintField()


# --- calls of tools ---------------------------------------------------------------------------------------------------


class ToolChoice(NamedTuple):
    """Which tools an answer calls: "auto", "none", "required", or "function" for the one with this name."""

    kind: str = "auto"
    name: str = ""

    def constraint(self, tools: Sequence[Tool]) -> Constraint | None:
        """The constraint on the answer to a chat with these tools.

        Raises:
            ApiError: 400, the function is not among the tools.
        """
        if self.kind in ("auto", "none"):
            return None
        functions = [tool["function"] for tool in tools]
        if self.kind == "function":
            functions = [function for function in functions if function["name"] == self.name]
            if not functions:
                message = f"tool_choice names {self.name[:80]!r}, which is not among tools: add it to them"
                raise ApiError(400, message, "tool_choice")
        if not functions:
            raise ApiError(400, "tool_choice requires a call, and there are no tools: send some", "tool_choice")
        return calls(
            [
                Function(
                    function["name"], function.get("parameters") or NO_ARGUMENTS, function.get("strict") is not True
                )
                for function in functions
            ]
        )


def parse_tool_choice(value: Any) -> ToolChoice:
    """OpenAI's field, of chats or of responses. Raises `FieldError`."""
    if value in ("auto", "none", "required"):
        return ToolChoice(value)
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return ToolChoice("function", name)
    named = '{"type": "function", "function": {"name": ...}}'
    raise FieldError(f'is none of "auto", "none", "required" and {named}: send one')


# --- grammars ---------------------------------------------------------------------------------------------------------


class Grammars:
    """Compiles the constraints of all requests to a server, in a thread.

    Args:
        tokenizer: mlx-lm's.
        unknown: for schemas that are not fully enforced.
    """

    def __init__(self, tokenizer: Any, unknown: UnknownFields) -> None:
        self._unknown = unknown
        self._tokenizer, self._compiler = tokenizer, GrammarCompiler(tokenizer)
        self._thread = ThreadPoolExecutor(1, "mlx-kv grammar")  # so that no prompt waits for a slow grammar

    async def compile(self, constraint: Constraint | None, param: str) -> Grammar | None:
        """The grammar of a constraint; None for none.

        Args:
            param: the field that has the constraint.

        Raises:
            ApiError: 400 for one that is refused or takes too long, 429 where others take too long.
        """
        if constraint is None:
            return None
        marks = marks_of(self._tokenizer)
        compiling = self._thread.submit(
            without_panic, "the grammar compiler", lambda: self._compiler.compile(constraint, marks)
        )
        try:
            grammar = await asyncio.wait_for(asyncio.wrap_future(compiling), COMPILE_SECONDS)
        except TimeoutError:
            if compiling.cancelled():  # before its turn came
                message = "grammars of other requests are being compiled: try again later"
                raise ApiError(429, message, param, headers={"Retry-After": "5"}) from None
            message = f"it took more than {COMPILE_SECONDS:g} seconds to compile: send a smaller one"
            raise ApiError(400, f"{param} cannot be followed: {message}", param) from None
        except GrammarError as error:
            raise ApiError(400, f"{param} cannot be followed: {error}", param) from None
        for unenforced in grammar.unenforced:
            if self._unknown.strict:
                raise ApiError(400, f"{param} cannot be followed: {unenforced}", param)
            self._unknown.log_once(unenforced, f"schemas that are not strict are not fully enforced: {unenforced}")
        return grammar

    def close(self) -> None:
        """Ends the thread after the grammar that it compiles."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def processor(self, grammar: Grammar, prompt: list[int], chat: bool, may_call: bool) -> GrammarProcessor:
        """The logits processor that makes one answer follow a grammar.

        Args:
            prompt: the tokens before the answer.
            chat: whether reasoning may precede the answer.
            may_call: whether the answer may be a tool call instead.
        """
        return grammar.processor(len(prompt), LeadIn.after(self._tokenizer, prompt, may_call) if chat else None)


def marks_of(tokenizer: Any) -> CallMarks | None:
    """The tokens around a call, for models that write calls as JSON; None for other models."""
    if not tokenizer.has_tool_calling or tokenizer.tool_parser is not json_tools.parse_tool_call:
        return None
    return CallMarks(tuple(tokenizer.tool_call_start_tokens), tuple(tokenizer.tool_call_end_tokens or ()))
