"""Constraints of an answer, as requested and as grammars of llguidance.

llguidance reads JSON schemas, regular expressions, and grammars in the notation of Lark or of llama.cpp (GBNF).
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

# White space between two parts of JSON: none, a space, or a new line and what stands before the next part. It has an
# end, which a small model's would not.
WHITESPACE = r"[ ]?|\n[ ]{0,40}|\n\t{0,12}"
# The name of a rule, among texts, sets of characters and comments, which are to be passed over.
GBNF_START = re.compile(r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|#[^\n]*|(?<![\w-])start(?![\w-])')
LARK_START = re.compile(r"^[^\S\n]*start\s*(\[|:(?!:=))", re.MULTILINE)
MOST_BYTES = 128 * 1024  # of what was asked for

# Errors of the library, and what the caller reads instead.
MATCHES_NOTHING = "no text matches it: change the pattern"
ENDLESS = (
    "it refers to itself without end, or a pattern in it matches no text, so that no answer is possible: "
    "add an alternative that ends, or change the pattern"
)
PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
REGEX_ERROR = re.compile(r"regex parse error:.*?\nerror: ", re.DOTALL)
REWORDED = (
    (r"failed to compile JSON schema: ", ""),
    (r" \(in regex\): regex error: ", ": "),
    (r" \(in regex\): ", ": "),
    (r"^regex error: ", "a pattern or range in it cannot be used: "),
    (r"^Failed to convert the grammar from GBNF to Lark: ", "it is no GBNF: "),
    (r"^Unimplemented keys: \[(.*)\]", r"\1 cannot be enforced: leave it out"),
    (r"Pointer '(.*?)' does not exist", r"it refers to '#\1', which is not in the schema: add it"),
    (
        r"Resource '(?:json-schema:///)?(.*?)' is not present in a registry and .*",
        r"it refers to '\1', which is not fetched: copy that schema into $defs",
    ),
    (
        r"circular references with sibling keys are not supported: (?:json-schema:///)?#?(.*)",
        r"a $ref that leads back to itself ('#\1') has keywords beside it: leave them out",
    ),
)

Kind = Literal["json_schema", "regex", "grammar", "choice", "calls"]


class GrammarError(ValueError):
    """What was asked for cannot be had, and why."""


@dataclass(frozen=True)
class Constraint:
    """What an answer is to be. The functions of this module make them.

    Attributes:
        kind: how `text` is to be read.
        text: a JSON schema, a regular expression, a grammar; JSON with a list of texts, or of functions.
        lenient: what a schema says that cannot be enforced is passed over.
    """

    kind: Kind
    text: str
    lenient: bool = False


@dataclass(frozen=True)
class CallMarks:
    """What stands before and after each call of a function, as a model that knows such calls writes them.

    Attributes:
        start, end: token ids.
        space: text between them and the call.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    space: str = "\n"


@dataclass(frozen=True)
class Function:
    """A function that may be called.

    Attributes:
        parameters: JSON schema of its arguments, an object.
        lenient: as of a `Constraint`.
    """

    name: str
    parameters: Any
    lenient: bool = True


def json_schema(schema: Any, lenient: bool = False) -> Constraint:
    """JSON that a schema describes: an object, or true for any JSON."""
    return Constraint("json_schema", json.dumps(schema), lenient)


def json_object() -> Constraint:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> Constraint:
    """A text that all of a regular expression describes: Rust's, without looking around or going back."""
    return Constraint("regex", pattern)


def grammar(text: str) -> Constraint:
    """What a grammar describes, in the manner of llama.cpp (GBNF, `root ::= …`) or of Lark (`start: …`)."""
    return Constraint("grammar", text)


def choice(texts: Sequence[str]) -> Constraint:
    """One of several texts."""
    return Constraint("choice", json.dumps(list(texts)))


def calls(functions: Sequence[Function]) -> Constraint:
    """A call of one of several functions: `{"name": …, "arguments": {…}}`."""
    return Constraint("calls", json.dumps([[one.name, one.parameters, one.lenient] for one in functions]))


def grammar_source(constraint: Constraint, marks: CallMarks | None = None) -> str:
    """The grammar of a constraint, in the words of llguidance.

    Args:
        marks: of calls; without, a call is the whole answer.

    Raises:
        GrammarError: it is too long, or no grammar of its kind. Most of what may be wrong is found when it is compiled.
    """
    if (size := len(constraint.text.encode("utf-8", "replace"))) > MOST_BYTES:
        raise GrammarError(f"it has {size:,} bytes, and at most {MOST_BYTES:,} are accepted: make it shorter")
    matcher: Any = found_library().LLMatcher
    if constraint.kind == "json_schema":
        return str(matcher.grammar_from_json_schema(_enforced(json.loads(constraint.text), constraint.lenient)))
    if constraint.kind == "regex":
        return str(matcher.grammar_from_regex(constraint.text))
    if constraint.kind == "choice":
        return str(matcher.grammar_from_lark("start: " + " | ".join(map(_literal, json.loads(constraint.text)))))
    if constraint.kind == "calls":
        return str(matcher.grammar_from_lark(_lark_of_calls(json.loads(constraint.text), marks)))
    # Without empty lines: in many of them the library's search would look at each from each.
    text = "\n".join([line for line in constraint.text.split("\n") if line.strip()])
    if is_lark(constraint):
        return str(matcher.grammar_from_lark(text))
    try:
        return str(found_library().grammar_from("grammar", _without_start(text)))
    except (ValueError, RecursionError) as error:
        raise GrammarError(error_message(error, constraint)) from None


def is_lark(constraint: Constraint) -> bool:
    """Whether it is a grammar in the manner of Lark."""
    return constraint.kind == "grammar" and LARK_START.search(constraint.text) is not None


def _without_start(text: str) -> str:
    """A grammar of llama.cpp without a rule named `start`, which is what the library calls its `root`."""
    name = "begin"
    while name in text:
        name += "-again"
    return GBNF_START.sub(lambda found: name if found[0] == "start" else found[0], text)


def _enforced(schema: Any, lenient: bool) -> str:
    """A schema with what is said to the library about it."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema is an object: send one")
    options = {"whitespace_pattern": WHITESPACE, "lenient": lenient, "coerce_one_of": lenient}
    return json.dumps(schema | {"x-guidance": options})


def _lark_of_calls(functions: list[tuple[str, Any, bool]], marks: CallMarks | None) -> str:
    """Each schema is a document of its own, so that what refers to `#/$defs` finds it."""
    if not functions:
        raise GrammarError("there is no function to be called: send one")
    before = after = ""
    if marks is not None:
        before = " ".join(f"<[{token}]>" for token in marks.start) + f" {_literal(marks.space)} "
        after = f" {_literal(marks.space)} " + " ".join(f"<[{token}]>" for token in marks.end)
    rules = [f"start: {before}call{after}", "call: " + " | ".join(f"call_{index}" for index in range(len(functions)))]
    for index, (name, parameters, lenient) in enumerate(functions):
        begin = _literal(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
        rules.append(f'call_{index}: {begin} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {_enforced(parameters, lenient)}")
    return "\n".join(rules) + "\n"


def _literal(text: str) -> str:
    """A text, in a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def error_message(error: object, constraint: Constraint | None = None) -> str:
    """An error of the library in one line, in the words of who wrote the constraint.

    Args:
        constraint: which was being compiled; None is at work already.
    """
    text = " ".join(REGEX_ERROR.sub("regex error: ", re.split(r"\n +\d+ \||<non-verbose/>", str(error))[0]).split())
    if text == "NoExtensionBias":
        return MATCHES_NOTHING if constraint is not None and constraint.kind == "regex" else ENDLESS
    if (place := PLACE.match(text)) is not None:
        text = text[place.end() :]
        if constraint is not None and is_lark(constraint):  # other places are in what was made of the constraint
            numbers = [number for number, line in enumerate(constraint.text.split("\n"), 1) if line.strip()]
            text = f"line {dict(enumerate(numbers, 1)).get(int(place[1]), place[1])}, column {place[2]}: {text}"
    for pattern, words in REWORDED:
        text = re.sub(pattern, words, text)
    return text[:300]


def found_library() -> Any:
    """llguidance.

    Raises:
        GrammarError: it is not installed.
    """
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise GrammarError(f"structured output needs llguidance ({error}): pip install 'mlx-kv[structured]'") from None
