"""Answers that follow a grammar: a JSON schema, a regular expression, a grammar, or calls of functions.

llguidance reads JSON schemas, regular expressions, and grammars in the notation of Lark or of llama.cpp (GBNF). Its
matcher is rolled back and advanced to the tokens of each call, so that rounds may query any place of a draft in any
order. V is the vocabulary.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from transformers import PreTrainedTokenizerFast

from mlx_kv.generation.grammar_in_json import grammar_in_json, literal
from mlx_kv.generation.sequence import common_prefix
from mlx_kv.generation.thinking import LeadIn
from mlx_kv.settings import shown

# --- constraints, as requested and as grammars of llguidance ----------------------------------------------------------


# White space between two parts of JSON: none, a space, or a new line and what stands before the next part. It has an
# end, which a small model's would not.
WHITESPACE = r"[ ]?|\n[ ]{0,40}|\n\t{0,12}"
# The name of a rule, among texts, sets of characters and comments, which are to be passed over.
GBNF_START = re.compile(r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|#[^\n]*|(?<![\w-])start(?![\w-])')
LARK_START = re.compile(r"^[^\S\n]*start\s*(\[|:(?!:=))", re.MULTILINE)
MAX_BYTES = 128 * 1024  # of a constraint

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

Kind = Literal["json_schema", "regex", "grammar", "choice", "calls", "auto_calls"]


class GrammarError(ValueError):
    """A constraint that cannot be compiled."""


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

    @property
    def has_texts(self) -> bool:
        """Whether functions take texts that follow grammars."""
        return self.kind in ("calls", "auto_calls") and any(each[-1] for each in json.loads(self.text))


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
        text: a Lark grammar of its only argument; empty is none.
    """

    name: str
    parameters: Any
    lenient: bool = True
    text: str = ""


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


def calls(functions: Sequence[Function], auto: bool = False) -> Constraint:
    """A call of one of several functions: `{"name": …, "arguments": {…}}`.

    Args:
        auto: whether it begins where the model begins a call, if it does. There may be several then.
    """
    text = json.dumps([[one.name, one.parameters, one.lenient, one.text] for one in functions])
    return Constraint("auto_calls" if auto else "calls", text)


def grammar_source(constraint: Constraint, marks: CallMarks | None, left_out: list[str]) -> str:
    """The grammar of a constraint, in the words of llguidance.

    Args:
        marks: of calls; without, a call is the whole answer.
        left_out: gets what is left out of lenient schemas, in words.

    Raises:
        GrammarError: it is too long, or no grammar of its kind. Most of what may be wrong is found when it is compiled.
    """
    if (size := len(constraint.text.encode("utf-8", "replace"))) > MAX_BYTES:
        raise GrammarError(f"it has {size:,} bytes, and at most {MAX_BYTES:,} are accepted: make it shorter")
    matcher: Any = import_llguidance().LLMatcher
    if constraint.kind == "json_schema":
        return str(
            matcher.grammar_from_json_schema(_enforced(json.loads(constraint.text), constraint.lenient, left_out))
        )
    if constraint.kind == "regex":
        return str(matcher.grammar_from_regex(constraint.text))
    if constraint.kind == "choice":
        return str(matcher.grammar_from_lark("start: " + " | ".join(map(literal, json.loads(constraint.text)))))
    if constraint.kind in ("calls", "auto_calls"):
        lark = _lark_of_calls(json.loads(constraint.text), marks, constraint.kind == "auto_calls", left_out)
        return str(matcher.grammar_from_lark(lark))
    # Without empty lines: in many of them the library's search would look at each from each.
    text = "\n".join([line for line in constraint.text.split("\n") if line.strip()])
    if is_lark(constraint):
        return str(matcher.grammar_from_lark(text))
    name = "begin"  # for a rule named `start`, which is what the library calls the `root`
    while name in text:
        name += "-again"
    text = GBNF_START.sub(lambda match: name if match[0] == "start" else match[0], text)
    try:
        return str(import_llguidance().grammar_from("grammar", text))
    except (ValueError, RecursionError) as error:
        raise GrammarError(error_message(error, constraint)) from None


def is_lark(constraint: Constraint) -> bool:
    """Whether it is a grammar in the manner of Lark."""
    return constraint.kind == "grammar" and LARK_START.search(constraint.text) is not None


def _enforced(schema: Any, lenient: bool, left_out: list[str]) -> str:
    """A schema with what is said to the library about it, and if it is lenient without patterns that cannot be used."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema is an object: send one")
    options = {"whitespace_pattern": WHITESPACE, "lenient": lenient, "coerce_one_of": lenient}
    return json.dumps(_with_usable_patterns(schema, "the value", lenient, left_out) | {"x-guidance": options})


def _with_usable_patterns(schema: Any, name: str, lenient: bool, left_out: list[str]) -> Any:
    """A schema without the patterns that the library cannot use, such as those that look ahead.

    Args:
        name: of the property that it describes.

    Raises:
        GrammarError: there is one, and the schema is not lenient.
    """
    if isinstance(schema, list):
        return [_with_usable_patterns(each, name, lenient, left_out) for each in schema]
    if not isinstance(schema, dict):
        return schema
    usable = {}
    for key, value in schema.items():
        patterns = [value] if key == "pattern" and isinstance(value, str) else []
        if isinstance(value, dict) and key == "patternProperties":
            patterns = list(value)
        errors = {pattern: error for pattern in patterns if (error := _pattern_error(pattern))}
        for pattern, error in errors.items():
            problem = f"the pattern {shown(pattern)} of {name} cannot be used: {error}"
            if not lenient:
                raise GrammarError(f"{problem}; change it"[:300])
            left_out.append(f"{problem}; it is left out")
        if key in ("const", "default", "enum", "examples"):
            usable[key] = value  # are not schemas
        elif isinstance(value, dict) and key in ("properties", "patternProperties"):
            usable[key] = {
                inner: _with_usable_patterns(each, repr(inner), lenient, left_out)
                for inner, each in value.items()
                if key == "properties" or inner not in errors
            }
        elif not errors:
            usable[key] = _with_usable_patterns(value, name, lenient, left_out)
    return usable


def _pattern_error(pattern: str) -> str:
    """Why the library cannot use a pattern of a schema; empty if it can."""
    matcher: Any = import_llguidance().LLMatcher
    source = matcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    error = matcher.validate_grammar(source)
    return error_message(error).partition("cannot be used: ")[2] or error_message(error) if error else ""


def _lark_of_calls(
    functions: list[tuple[str, Any, bool, str]], marks: CallMarks | None, several: bool, left_out: list[str]
) -> str:
    """Each schema is a document of its own, so that what refers to `#/$defs` finds it."""
    if not functions:
        raise GrammarError("there is no function to be called: send one")
    before = after = space = ""
    if marks is not None:
        space = literal(marks.space)
        before = " ".join(f"<[{token}]>" for token in marks.start) + f" {space} "
        after = f" {space} " + " ".join(f"<[{token}]>" for token in marks.end)
    rules = [f"start: one ({space} one)*" if several else "start: one", f"one: {before}call{after}"]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
    for index, (name, parameters, lenient, text) in enumerate(functions):
        begin = literal(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
        rules.append(f'call_{index}: {begin} arguments_{index} "}}"')
        arguments = _lark_of_text(text, next(iter(parameters["properties"])), name, left_out) if text else ""
        rules.append(f"arguments_{index}: {arguments or f'%json {_enforced(parameters, lenient, left_out)}'}")
    return "\n".join(rules) + "\n"


def _lark_of_text(text: str, argument: str, function: str, left_out: list[str]) -> str:
    """Arguments that are one text, which follows a grammar; empty where that cannot be used."""
    matcher: Any = import_llguidance().LLMatcher
    try:
        inner = grammar_in_json(text)
        error = matcher.validate_grammar(matcher.grammar_from_lark(inner))
        problem = error_message(error) if error else ""
    except ValueError as error:
        problem = str(error)
    if problem:
        left_out.append(f"the grammar of {shown(function)} cannot be used: {problem}; it is left out")
        return ""
    begin, end = f'{{{json.dumps(argument)}: "', '"}'
    return f"{literal(begin)} %lark {{\n{inner}}} {literal(end)}"


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
        if constraint is not None and is_lark(constraint):  # other places are in the grammar that was made of it
            numbers = [number for number, line in enumerate(constraint.text.split("\n"), 1) if line.strip()]
            text = f"line {dict(enumerate(numbers, 1)).get(int(place[1]), place[1])}, column {place[2]}: {text}"
    for pattern, words in REWORDED:
        text = re.sub(pattern, words, text)
    return text[:300]


def import_llguidance() -> Any:
    """llguidance.

    Raises:
        GrammarError: it is not installed.
    """
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise GrammarError(f"structured output needs llguidance ({error}): pip install 'mlx-kv[structured]'") from None


# --- compiled grammars ------------------------------------------------------------------------------------------------


MAX_CACHED = 32  # grammars: clients send the same again and again
# The library's own measure of work: 50,000 of it are about a millisecond. Regular expressions that are more than this
# are still used, but the masks that follow from them are not made beforehand.
COMPILE_FUEL = 200_000
# And of one mask: a schema takes tens of them, a grammar that reads a text in very many ways ever more with its length.
MASK_ITEMS = 4_000
MASK_ITEMS_OF_TEXTS = 100_000  # where each character is a lexeme: some thousands of items, and milliseconds


class Grammar:
    """A constraint that is compiled.

    Args:
        matcher: of the library, where nothing has been generated. It is copied for each row.
        ends: ids of tokens that end a sequence.
        spelling: of texts that have to follow.
        left_out: of a lenient schema, in words.

    Attributes:
        unenforced: what a lenient schema says that is passed over: what was left out, and what the library says.
    """

    def __init__(self, matcher: Any, ends: Sequence[int], spelling: Spelling, left_out: Sequence[str] = ()) -> None:
        self._matcher, self._ends, self._spelling = matcher, tuple(ends), spelling
        self.unenforced = (*left_out, *(error_message(warning) for warning in matcher.get_grammar_warnings()))

    def processor(self, prompt_tokens: int, lead_in: LeadIn | None = None) -> GrammarProcessor:
        """What keeps one row to it.

        Args:
            prompt_tokens: how many tokens come before the answer, those that were read before among them.
            lead_in: what may stand before the grammar, or in its place; None is nothing.
        """
        return GrammarProcessor(self._matcher, self._ends, prompt_tokens, lead_in or LeadIn(), self._spelling)


class GrammarCompiler:
    """Compiles constraints, and caches the grammars.

    Args:
        tokenizer: mlx-lm's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: Any = None
        self._spelling: Any = None
        self.compile = lru_cache(MAX_CACHED)(self._compile)

    def _compile(self, constraint: Constraint, marks: CallMarks | None = None) -> Grammar:
        """The grammar of a constraint.

        Args:
            marks: of calls, as of `grammar_source`.

        Raises:
            GrammarError: the library, or the tokenizer, refuses it.
        """
        left_out: list[str] = []
        source = grammar_source(constraint, marks, left_out)
        library, ends = import_llguidance(), sorted(self._tokenizer.eos_token_ids)
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary(ends)
        items = MASK_ITEMS_OF_TEXTS if constraint.has_texts else MASK_ITEMS
        limits = library.LLParserLimits(initial_lexer_fuel=COMPILE_FUEL, step_max_items=items, verbose_errors=False)
        matcher = library.LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask takes longest
        if matcher.is_error():
            raise GrammarError(error_message(matcher.get_error(), constraint))
        return Grammar(matcher, ends, self._spelling, left_out)

    def _make_vocabulary(self, ends: list[int]) -> Any:
        """The tokenizer in the form of llguidance, which takes a second."""
        inner = getattr(self._tokenizer, "_tokenizer", self._tokenizer)
        if not isinstance(inner, PreTrainedTokenizerFast):
            raise GrammarError(f"this model's tokenizer ({type(inner).__name__}) is not of the kind that can be masked")
        from llguidance.hf import from_tokenizer

        self._spelling = Spelling(inner)
        return from_tokenizer(inner, eos_token=ends)


# --- logits processors of rows ----------------------------------------------------------------------------------------


SPECIAL = b"\xff"  # what the library writes before a special token that a grammar has by its name


class Spelling:
    """How texts are written without special tokens.

    The library takes the tokens of a text that has to follow from the tokenizer, which makes special tokens of their
    names; and then takes none of those for the text.

    Attributes:
        special: ids of special tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder.items()
        self.special = frozenset(token for token, content in added if content.special)
        self._tokenizer = tokenizer

    def tokens(self, text: bytes) -> list[int]:
        """Ids of ordinary tokens for a text, of which the last character may be incomplete."""
        ids: list[int] = self._tokenizer.encode(
            text.decode(errors="ignore"), add_special_tokens=False, split_special_tokens=True
        )
        return ids


class GrammarProcessor:
    """A logits processor as mlx-lm has them, for one row.

    Args:
        matcher: the library's, where nothing has been generated.
        ends: ids of tokens that end a sequence: all that is left when the grammar is at its end.
        prompt_tokens: how many of the tokens that are shown are not the answer's.
        lead_in: what may stand before the grammar, or in its place.
        spelling: of texts that have to follow.
    """

    def __init__(
        self, matcher: Any, ends: tuple[int, ...], prompt_tokens: int, lead_in: LeadIn, spelling: Spelling
    ) -> None:
        self._fresh, self._matcher, self._spelling = matcher, matcher.deep_copy(), spelling
        self._ends, self._prompt_tokens, self._lead_in = ends, prompt_tokens, lead_in
        self._consumed: list[int] = []
        self._failed: tuple[list[int], str] | None = None  # after which tokens the library gave up, and why

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits (1, V) after tokens (n,): minus infinity where the grammar has no such token.

        While the model thinks, before the grammar begins, all but the end of the answer may come. Where the tokens
        themselves are none of the grammar's, as behind a draft that is wrong, nothing is changed.
        """
        shown = tokens[self._prompt_tokens :]
        mx.async_eval(shown)  # type: ignore[no-untyped-call]
        mx.async_eval(logits)  # type: ignore[no-untyped-call]  # the model goes on while the mask is made
        answer: Any = shown.tolist()
        begins = self._lead_in.grammar_from(answer)
        if begins is None:  # a call may end, but thinking that does leaves no answer
            return _masked(logits, ~self._where_it_ends(logits)) if self._lead_in.thinks(answer) else logits
        constrained = answer[begins:]
        follows, others = self._follow(constrained), self._lead_in.others(answer)
        if not follows and not others and self._why(constrained) is None:
            return logits
        allowed = self._mask(logits.shape[-1]) if follows else np.zeros(logits.shape[-1], dtype=bool)
        allowed[others] = True
        return _masked(logits, allowed if allowed.any() else self._where_it_ends(logits))

    def allowed(self, tokens: mx.array, drafted: list[int]) -> int:
        """How many of the drafted tokens can stand after these."""
        answer: Any = tokens[self._prompt_tokens :].tolist()
        together = [*answer, *drafted]
        begins = self._lead_in.grammar_from(together)
        if begins is None or self._lead_in.others(together):
            return self._end(drafted) if self._lead_in.thinks(together) else len(drafted)
        first = max(begins - len(answer), 0)  # what comes before is thinking, which does not end the answer
        if (end := self._end(drafted[:first])) < first:
            return end
        known, rest = together[begins : len(answer) + first], drafted[first:]
        if not self._follow(known):
            return first
        text = rest[: self._end(rest)]
        count = int(self._matcher.validate_tokens(text))
        ends = count == len(text) < len(rest) and self._follow([*known, *text]) and self._matcher.is_accepting()
        return first + count + int(ends)

    def error_in(self, answer: Sequence[int], whole: bool = False) -> str | None:
        """Why an answer does not follow the grammar, in the library's words if it has any; None if it does.

        Args:
            whole: whether the model has ended it; else it may lack its end.
        """
        answer = list(answer)
        begins = self._lead_in.grammar_from(answer)
        if begins is None or (not whole and self._lead_in.others(answer)):
            return None
        constrained = answer[begins:]
        text = constrained[: self._end(constrained)]
        if not self._follow(text):
            return self._why(constrained) or "the model left it"
        return "the model ended before it does" if whole and not self._matcher.is_accepting() else None

    def _why(self, tokens: list[int]) -> str | None:
        """Why the library can say nothing of what follows these tokens; None where it can."""
        if self._failed is None or tokens[: len(self._failed[0])] != self._failed[0]:
            return None
        return self._failed[1]

    def _follow(self, tokens: list[int]) -> bool:
        """Has the matcher stand after these tokens; whether they are the grammar's, and it goes on."""
        if self._why(tokens) is not None:
            return False
        same = common_prefix(self._consumed, tokens)
        back = len(self._consumed) - same
        # llguidance 1.9 takes no special token any more after it was rolled back to the beginning.
        if self._matcher.is_error() or (back and (same == 0 or not self._matcher.rollback(back))):
            self._matcher, self._consumed = self._fresh.deep_copy(), []
        del self._consumed[same:]
        more = tokens[len(self._consumed) : self._end(tokens)]
        count = int(self._matcher.try_consume_tokens(more)) if more else 0
        self._consumed += more[:count]
        return self._works(more[count : count + 1]) and len(self._consumed) == len(tokens)

    def _end(self, tokens: list[int]) -> int:
        """Position of the first end token. They are not part of the grammar, so llguidance gets none of them."""
        return min((tokens.index(end) for end in self._ends if end in tokens), default=len(tokens))

    def _mask(self, vocabulary: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which tokens (V,) may come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=min(vocabulary, 8 * bits.size), bitorder="little").astype(bool)
        allowed = np.zeros(vocabulary, dtype=bool)
        allowed[: mask.size] = mask
        if len(only := np.flatnonzero(allowed)) == 1 and int(only[0]) in self._spelling.special:
            text = self._matcher.compute_ff_bytes()
            if SPECIAL not in text:  # the text of a special token, and not the token
                allowed[only] = False
                allowed[self._spelling.tokens(text)[:1]] = True
        return allowed & self._works()

    def _where_it_ends(self, logits: mx.array) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which tokens (V,) of logits (1, V) end a sequence."""
        ends = np.zeros(logits.shape[-1], dtype=bool)
        ends[[token for token in self._ends if token < ends.size]] = True
        return ends

    def _works(self, at: Sequence[int] = ()) -> bool:
        """Whether the library still can. A matcher that has given up never goes on, but others may, elsewhere.

        Args:
            at: the token at which it may have given up; none is after what was consumed.
        """
        if not self._matcher.is_error():
            return True
        self._failed = [*self._consumed, *at], error_message(self._matcher.get_error())
        return False


def _masked(logits: mx.array, allowed: np.ndarray[Any, np.dtype[np.bool_]]) -> mx.array:
    """Logits (1, V) with minus infinity for tokens (V,) that are not allowed."""
    return mx.where(mx.array(allowed), logits, mx.array(-mx.inf, dtype=logits.dtype))
