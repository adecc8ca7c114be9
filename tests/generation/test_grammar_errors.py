"""Schemas, patterns and grammars that cannot be followed: the error says why, in the caller's words."""

from __future__ import annotations

import re
from typing import Any

import pytest
from test_grammars import shown_to_all

from mlx_kv.generation import grammar as constraints
from mlx_kv.generation.grammar import Constraint, Function, GrammarCompiler, GrammarError, grammar_source


@pytest.fixture(scope="module")
def compiler(reference: Any) -> GrammarCompiler:
    return GrammarCompiler(reference[1])


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (constraints.json_schema({"type": "foo"}), "foo"),
        (constraints.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (constraints.json_schema({"$ref": "https://example.com/schema"}), "example.com"),
        (constraints.json_schema([1]), "an object"),
        (constraints.json_schema({"enum": ["x" * 200_000]}), "at most 131,072 are accepted"),
        (constraints.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (constraints.regex("("), "unclosed group"),
        (constraints.regex(r"(?=x)y"), "look-around"),
        (constraints.grammar("root ::= ("), "GBNF"),
        (constraints.grammar("start: %json {"), "EOF"),
        (constraints.calls([]), "no function"),
        (constraints.calls([Function("f", {"type": "foo"})]), "foo"),
        (constraints.json_schema({"$ref": "#"}), "refers to itself without end"),
        (constraints.json_schema({"$ref": "#"}, lenient=True), "refers to itself without end"),
        (constraints.json_schema({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#"}}}), "without end"),
        (constraints.grammar("start: start"), "refers to itself without end"),
        (constraints.grammar("root ::= a\na ::= root"), "refers to itself without end"),
        (constraints.regex(r"[^\s\S]"), "no text matches it: change the pattern"),
        (constraints.regex("("), 'invalid regex "(": unclosed group'),
        (
            constraints.json_schema({"type": "string", "pattern": "("}),
            "the pattern '(' of the value cannot be used: unclosed group; change it",
        ),
        (
            constraints.calls([Function("f", {"properties": {"a": {"pattern": "("}}}, lenient=False)]),
            "the pattern '(' of 'a' cannot be used: unclosed group; change it",
        ),
        (constraints.json_schema({"allOf": [{"$ref": "#"}, {"$ref": "#"}]}), "a $ref that leads back to itself ('#')"),
        (constraints.json_schema({"$ref": "#/$defs/a"}), "it refers to '#/$defs/a', which is not in the schema: add"),
        (constraints.json_schema({"$ref": "https://example.com/schema"}), "copy that schema into $defs"),
        (constraints.json_schema({"if": {}, "then": {}}), '"if", "then" cannot be enforced: leave it out'),
        (constraints.grammar("root ::= x"), "it is no GBNF: Rule 'x' not found"),
        (constraints.grammar('\nstart: a\n\n\na: "x" b'), 'line 5, column 4: unknown name: "b"'),
        (constraints.calls([Function("f", {"type": "integer", "minimum": 5, "maximum": 3})]), "Unsatisfiable schema"),
    ],
)
def test_what_cannot_be_followed_says_why(compiler: GrammarCompiler, constraint: Constraint, why: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(why)) as raised:
        compiler.compile(constraint)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) <= 300
    for inner in ("NoExtensionBias", "at 1(", "at 4(", "registry", "Failed to", "parse error", "Pointer", "Unimpl"):
        assert inner not in str(raised.value)


def test_a_part_that_refers_to_itself_without_end_ends_the_answer_where_it_begins(
    compiler: GrammarCompiler, reference: Any
) -> None:
    processor = compiler.compile(constraints.grammar('start: "x" a\na: a')).processor(0)
    tokens = reference[1].encode("x")
    assert shown_to_all(processor, tokens) == {0}
    assert "refers to itself without end" in (processor.error_in([*tokens, 0]) or "")


EMAIL = r"^(?!\.)[a-z.]+@[a-z.]+$"


@pytest.mark.parametrize(
    ("schema", "left"),
    [
        ({"type": "string", "pattern": EMAIL}, {"type": "string"}),
        (
            {"type": "object", "properties": {"to": {"items": {"pattern": EMAIL}}, "pattern": {"pattern": "^a$"}}},
            {"type": "object", "properties": {"to": {"items": {}}, "pattern": {"pattern": "^a$"}}},
        ),
        ({"patternProperties": {EMAIL: {}, "^b": {"pattern": "("}}}, {"patternProperties": {"^b": {}}}),
        (
            {"anyOf": [{"pattern": r"(a)\1"}, {"const": {"pattern": EMAIL}}]},
            {"anyOf": [{}, {"const": {"pattern": EMAIL}}]},
        ),
    ],
)
def test_patterns_that_cannot_be_used_are_left_out_of_lenient_schemas(
    compiler: GrammarCompiler, schema: dict[str, Any], left: dict[str, Any]
) -> None:
    for make in (
        lambda one: constraints.json_schema(one, lenient=True),
        lambda one: constraints.calls([Function("f", one)]),
    ):
        said: list[str] = []
        assert grammar_source(make(schema), None, said) == grammar_source(make(left), None, [])
        assert said
        assert all(line.endswith("; it is left out") for line in said)
        assert compiler.compile(make(schema)).unenforced[: len(said)] == tuple(said)
    with pytest.raises(GrammarError, match=r"cannot be used: .*; change it"):
        compiler.compile(constraints.json_schema(schema))


def test_what_a_lenient_schema_leaves_out_is_said(compiler: GrammarCompiler) -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}
    assert "uniqueItems" in " ".join(compiler.compile(constraints.json_schema(schema, lenient=True)).unenforced)
    assert compiler.compile(constraints.json_object()).unenforced == ()
