"""`mlx-kv cache diff`: the first difference of two prompts or request bodies."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mlx_kv.bundled import model_path
from mlx_kv.cli.main import command
from mlx_kv.generation.encoding import encode_prompt
from mlx_kv.mlxlm.loading import load

SOURCE = (Path(__file__).parent.parent / "source.txt").read_text()


def diff(*arguments: object) -> list[str]:
    result = CliRunner().invoke(command, ["cache", "diff", *map(str, arguments)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout.splitlines()


def test_two_texts(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    texts = [f"{SOURCE[:400]}\n# Today is {day}.\n" for day in ("Monday", "Friday")]
    first.write_text(texts[0])
    second.write_text(texts[1])
    tokenizer = load(model_path("reference"))[1]
    one, other = (encode_prompt(tokenizer, text) for text in texts)
    common = next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    lines = diff(first, second)
    assert lines[:3] == [f"A       {len(one)} tokens", f"B       {len(other)} tokens", f"common  {common} tokens"]
    assert lines[3] == f"They differ at token {common}:"
    assert "Today is" in lines[4]
    assert lines[5].endswith("Monday.\\n'")
    assert lines[6].endswith("Friday.\\n'")
    assert diff(first, first)[-1] == "They are equal."


def test_a_prompt_that_goes_on(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("import os\n")
    second.write_text("import os\n\n\ndef f():\n")
    lines = diff(first, second)
    assert "below 64 tokens nothing is reused" in lines[2]
    assert lines[5] != lines[6]


BODIES = [
    {"prompt": SOURCE[:300]},
    {"messages": [{"role": "user", "content": SOURCE[:300]}]},
    {"system": "Be brief.", "messages": [{"role": "user", "content": SOURCE[:300]}], "max_tokens": 5},
    {"input": SOURCE[:300]},
]


@pytest.mark.parametrize("body", BODIES, ids=["completion", "chat", "messages", "responses"])
def test_two_request_bodies(tmp_path: Path, body: dict[str, object]) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps(body))
    changed = json.dumps(body).replace(json.dumps(SOURCE[150:300])[1:-1], "another text")
    second.write_text(changed)
    assert changed != first.read_text()
    lines = diff(first, second)
    assert lines[3].startswith("They differ at token ")
    assert "another" in lines[6]


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x89PNG\xff")
    with pytest.raises(click.UsageError, match=r"cannot read .*a\.bin: it is not a text in UTF-8$"):
        diff(tmp_path / "a.bin", tmp_path / "a.bin")


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    first, many, bad = tmp_path / "a.txt", tmp_path / "many.json", tmp_path / "bad.json"
    first.write_text("import os\n")
    many.write_text(json.dumps({"prompt": ["one", "two"]}))
    bad.write_text(json.dumps({"messages": "none"}))
    for other, message in ((many, "has 2 prompts"), (bad, "messages"), (tmp_path / "none", "does not exist")):
        with pytest.raises(click.UsageError, match=message):
            diff(first, other)
