"""Answers with a form, on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def call(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, reference: Any, draft: Any) -> Any:
    monkeypatch.setattr("mlx_kv.mlxlm.loading.load", lambda path, **_: (draft, None) if "draft" in path else reference)
    return lambda *arguments: command("generate", "--prompt", "person = ", "--max-tokens", "60", *map(str, arguments))


@pytest.mark.parametrize("drafts", [(), ("--draft", "suffix"), ("--draft-model", "reference")], ids=str)
def test_an_answer_follows_its_schema(call: Any, tmp_path: Path, drafts: tuple[str, ...]) -> None:
    file = tmp_path / "person.json"
    file.write_text(json.dumps(SCHEMA))
    answer = json.loads(json.loads(call("--json-schema", file, "--json", *drafts).out)["text"])
    assert set(answer) == {"name", "age"}
    assert 0 <= answer["age"] <= 99


def test_an_answer_follows_an_expression_or_a_grammar(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "answer.gbnf"
    file.write_text('root ::= "yes" | "no" [0-9]')
    assert re.fullmatch("[a-z]{3}-[0-9]", call("--regex", "[a-z]{3}-[0-9]", "--verbose", "false").out.rstrip("\n"))
    assert re.fullmatch("yes|no[0-9]", call("--grammar", file, "--verbose", "false").out.rstrip("\n"))


def test_a_form_that_is_none_is_one_line(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text("{")
    for options, why in (
        (("--json-schema", file), "is not JSON"),
        (("--regex", "("), "unclosed group"),
        (("--regex", "a", "--grammar", file), "give one"),
    ):
        called = call(*options)
        assert called.code == 2
        assert why in called.err
        assert called.err.count("\n") == 1
