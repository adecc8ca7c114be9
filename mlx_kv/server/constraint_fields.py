"""Fields of a request that say what form its answer has: OpenAI's, and those of other servers that say the same.

Decides which field is which constraint, and that there is one at the most. Knows nothing about tokens, nor whether a
schema or a grammar is a good one: that is found where it is compiled.
"""

from __future__ import annotations

from typing import Any

from mlx_kv.files.decoding import read_json
from mlx_kv.generation.grammar.constraint import (
    Constraint,
    Function,
    calls,
    choice,
    grammar,
    json_object,
    json_schema,
    regex,
)
from mlx_kv.server.errors import ApiError
from mlx_kv.server.fields import boolean, json_kind, typed, unicode

# llama-server's names, and vLLM's, old and new.
SCHEMAS, PATTERNS = ("json_schema", "guided_json"), ("regex", "guided_regex")
GRAMMARS, CHOICES = ("grammar", "guided_grammar"), ("guided_choice",)
FIELDS = {"response_format", "structured_outputs", *SCHEMAS, *PATTERNS, *GRAMMARS, *CHOICES}
OF_STRUCTURED_OUTPUTS = {"json": "guided_json", "regex": "regex", "choice": "guided_choice", "grammar": "grammar"}


def constraint_of(fields: dict[str, Any]) -> tuple[str, Constraint | None]:
    """What the fields of a request ask of its answer, after the name of the one that does; None is nothing.

    Raises:
        ApiError: 400, for what is no constraint, or more than one.
    """
    asked = {name: fields[name] for name in sorted(FIELDS) if name in fields}
    found = [(name, one) for name, value in asked.items() if (one := _constraint(name, value)) is not None]
    if len(found) > 1:
        raise ApiError(400, f"{found[0][0]} and {found[1][0]} both say what the answer is to be: send one", found[1][0])
    return found[0] if found else ("", None)


def forced_call(tools: list[dict[str, Any]], chosen: Any) -> Constraint | None:
    """What `tool_choice` asks of the answer to a chat with these tools; None is nothing.

    Raises:
        ApiError: 400, for one that is none, or a function that is not there.
    """
    if chosen in ("auto", "none"):
        return None
    functions = [tool["function"] for tool in tools]
    if chosen != "required":
        names = _names(chosen)
        functions = [function for function in functions if function["name"] in names]
        if missing := sorted(names - {function["name"] for function in functions}):
            raise ApiError(400, f"tool_choice names {missing[0][:80]!r}, which is not among tools", "tool_choice")
    if not functions:
        raise ApiError(400, "tool_choice asks for a call, and there are no tools: send some", "tool_choice")
    return calls(
        [
            Function(
                unicode(function["name"], "tools"),
                function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False},
                function.get("strict") is not True,
            )
            for function in functions
        ]
    )


def _names(chosen: Any) -> set[str]:
    """The functions that `tool_choice` allows, where a call is asked for."""
    if isinstance(chosen, dict) and chosen.get("type") == "function":
        function = chosen.get("function", chosen)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return {name}
    raise ApiError(
        400,
        'tool_choice is none of "auto", "none", "required" and {"type": "function", "function": {"name": ...}}',
        "tool_choice",
    )


def _constraint(name: str, value: Any) -> Constraint | None:
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _structured_outputs(value)
    if name in SCHEMAS:
        return json_schema(_schema(value, name))
    if name in CHOICES:
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise ApiError(400, f"{name} is no list of texts, or has none", name)
        return choice([unicode(text, name) for text in value])
    text = unicode(typed({name: value}, name, str, ""), name)
    if name in PATTERNS:
        if not text:
            raise ApiError(400, f"{name} is empty: send a pattern, or leave it out", name)
        return regex(text)
    return grammar(text) if text else None  # clients of llama-server send an empty one where they have none


def _response_format(value: Any) -> Constraint | None:
    where = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":  # llama-server's may have a schema of its own
        return json_schema(_schema(value["schema"], where)) if value.get("schema") else json_object()
    if kind == "json_schema":
        given = value.get("json_schema", value)  # the second is how the Responses API has it
        if not isinstance(given, dict) or given.get("schema") is None:
            raise ApiError(400, f"{where}.json_schema has no schema: send one", where)
        return json_schema(_schema(given["schema"], where), lenient=not boolean(_given(given), "strict"))
    if kind in ("regex", "grammar") and isinstance(value.get(kind), str):
        return _constraint(kind, value[kind])
    raise ApiError(400, f"{where} is no object with a type of text, json_object or json_schema", where)


def _structured_outputs(value: Any) -> Constraint | None:
    if not isinstance(value, dict):
        raise ApiError(400, f"structured_outputs is a JSON {json_kind(value)}: send an object", "structured_outputs")
    asked = _given(value)
    if unknown := asked.keys() - OF_STRUCTURED_OUTPUTS.keys():
        raise ApiError(
            400, f"structured_outputs has {min(unknown)[:80]!r}, which is not supported", "structured_outputs"
        )
    return constraint_of({OF_STRUCTURED_OUTPUTS[name]: one for name, one in asked.items()})[1]


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _schema(value: Any, where: str) -> Any:
    """A JSON schema, which some send as a text."""
    if isinstance(value, str):
        try:
            value = read_json(value)
        except ValueError as error:
            raise ApiError(400, f"{where} is no JSON: {error}"[:300], where) from None
    if not isinstance(value, dict):
        raise ApiError(400, f"{where} is a JSON {json_kind(value)}: send a schema, which is an object", where)
    return value
