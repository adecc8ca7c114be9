"""Request bodies as pydantic models: their base class, shared field types, and the formatter of validation errors.

A boolean is not a number, a number is not a string, and null is the same as a field that is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StringConstraints,
    ValidationError,
    WrapValidator,
    model_validator,
)

from mlx_kv.server.errors import ApiError, sendable

# Fields whose errors name the place within them as `param`; errors of other fields name the field.
LOCATED = {"cache", "input", "messages", "reasoning", "text"}
NO_UNICODE = "is not valid Unicode: remove the half of a surrogate pair"
TAG = "type="  # how tags of tagged unions begin, which pydantic adds to the location of an error
JSON_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
MAX_LOGGED = 256  # names of unknown fields: clients that make up more of them do not fill the log
log = logging.getLogger("mlx_kv.server")
WANTED = {
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
    wanted = model.model_fields[name].description
    if name in LOCATED:
        wanted = wanted if len(path) == 1 else None
    elif wanted:  # of a union, whose alternatives pydantic adds to the location
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
        message = f"{where} is missing: send {wanted or 'it'}"
    else:
        message = f"{where} {_problem(kind, value, context)}: send {wanted or _wanted(kind, context)}"
    return ApiError(400, message, where[:200] if name in LOCATED else name, code)


def _problem(kind: str, value: Any, context: dict[str, Any]) -> str:
    if kind == "too_long":
        return f"has {len(value):,} elements"
    if kind in ("too_short", "string_too_short"):
        return "is empty"
    if kind == "literal_error" and isinstance(value, str):
        return f"is {value[:80]!r}"
    return f"is {str(value)[:40]}" if json_kind(value) == "number" else f"is a JSON {json_kind(value)}"


def _wanted(kind: str, context: dict[str, Any]) -> str:
    for bound, words in (("ge", "at least"), ("le", "at most"), ("max_length", "at most"), ("min_length", "at least")):
        if bound in context and kind not in WANTED:
            limit = context[bound]
            return f"{words} {limit:,}" if isinstance(limit, int) else f"{words} {limit:g}"
    if kind == "literal_error":
        expected = context["expected"].replace("'", "")
        return f"one of {expected}".replace(" or ", ", ") if " or " in expected else str(expected)
    return WANTED.get(kind, "another value")


# --- types of fields --------------------------------------------------------------------------------------------------


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
