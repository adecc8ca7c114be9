"""What tests of `mlx-kv batch` share: prompts, the two files of a run, what a call left."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_kv.cli import main as cli
from mlx_kv.generation.generate import stream_generate

PROMPTS: list[dict[str, Any]] = [
    {"prompt": "def fibonacci(n):", "id": "fib"},
    {"prompt": "import os\n", "max_tokens": 3},
    {"prompt": [400, 401, 402], "max_tokens": 7, "id": 99},
    {"prompt": "class Stack:\n    def push(self", "max_tokens": 30},
    {"prompt": "# café 漢字\n", "id": "99"},  # not the id 99
    {"prompt": "for i in range(10):\n    print(", "max_tokens": 1},
]
GOOD = {"prompt": "import os\n", "max_tokens": 3}


class Called:
    """What one call of the command left: exit code and stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["mlx-kv", "batch", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        self.code = end.value.code
        out, self.err = capsys.readouterr()
        assert out == ""


class Files:
    """A file of prompts and one of answers."""

    def __init__(self, folder: Path) -> None:
        self.prompts, self.output = folder / "prompts.jsonl", folder / "answers.jsonl"

    def ask(self, *lines: Any) -> None:
        texts = (each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in lines)
        self.prompts.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")

    def options(self) -> tuple[str, ...]:
        return ("--prompts", str(self.prompts), "--output", str(self.output))

    def answers(self) -> list[dict[str, Any]]:
        text = self.output.read_text()
        assert text.endswith("\n")
        return [json.loads(each) for each in text.splitlines()]

    def by_id(self) -> dict[Any, dict[str, Any]]:
        found = self.answers()
        assert len({each["id"] for each in found}) == len(found)
        return {each["id"]: each for each in found}


def alone(reference: Any, prompt: Any, max_tokens: int) -> dict[str, Any]:
    """What an answer should say, by the loop for one prompt."""
    found = list(stream_generate(*reference, prompt, max_tokens=max_tokens))
    return {
        "text": "".join(each.text for each in found),
        "tokens": [each.token for each in found],
        "finish_reason": found[-1].finish_reason,
        "prompt_tokens": found[-1].prompt_tokens,
        "generation_tokens": len(found),
    }
