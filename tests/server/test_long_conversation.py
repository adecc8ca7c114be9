"""A conversation of 30,000 tokens with a server as it starts by default: each turn reads only what is new."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from serving import SOURCE, cached, command
from tiny_models import COMMON, make_model

from mlx_kv import model_path

pytestmark = pytest.mark.slow
SHAPE = {
    **COMMON,
    "model_type": "llama",
    "vocab_size": 4096,
    "num_hidden_layers": 2,
    "max_position_embeddings": 131_072,
}
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4  # of a token: layers, keys and values, heads, dimensions, float32
ASKED = 32_000  # the max_tokens that coding agents send
TEXT = SOURCE * 20


@pytest.fixture(scope="module")
def thin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two thin layers with 131,072 positions, and the tokenizer of the reference model."""
    folder = tmp_path_factory.mktemp("thin")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(model_path("reference")) / name, folder)
    weights: Any = tree_flatten(make_model("llama", **SHAPE).parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights))
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


class Conversation:
    """One that begins with 31,000 tokens or so, or a part of them; each turn adds some."""

    def __init__(self, url: str, start: int, part: float = 1) -> None:
        self.url, self.text, self.read = url, TEXT[start : start + int(96_000 * part)], 0

    def turn(self) -> tuple[int, int, int]:
        """Tokens of the prompt, those that were reused, and those of the prompt before.

        The model says anything, which as a text may have other tokens: the answer may have to be read again.
        """
        body = {"prompt": self.text, "max_tokens": ASKED, "stop": [":", "=", "("], "temperature": 0, "seed": 1}
        told = httpx.post(f"{self.url}/v1/completions", json=body, timeout=600)
        assert told.status_code == 200, told.text
        answer, before = told.json(), self.read
        self.text += answer["choices"][0]["text"] + "\nfor name in sorted(names):\n    print(name)\n"
        self.read = answer["usage"]["prompt_tokens"]
        return self.read, cached(answer), before


def test_each_turn_reads_only_what_is_new(thin: Path) -> None:
    with command("--model", str(thin)) as (_, url):
        one, other = Conversation(url, 0), Conversation(url, 5)
        assert [one.turn()[1], other.turn()[1]] == [0, 0]
        for _ in range(3):
            for conversation in (one, other):
                prompt, reused, before = conversation.turn()
                assert prompt > reused >= before - 1 > 30_000  # its last token may be another, beside the answer


def test_half_of_the_memory_keeps_the_beginning(thin: Path) -> None:
    with command("--model", str(thin), "--prompt-memory-bytes", str(6_000 * TOKEN_BYTES)) as (_, url):
        conversation = Conversation(url, 0, 0.4)
        assert conversation.turn()[1] == 0
        for _ in range(2):
            prompt, reused, _before = conversation.turn()
            assert prompt > 12_000
            assert 6_000 >= reused > 6_000 - 512
        assert httpx.get(f"{url}/memory").json()["prefixes"][-1]["reason"] == "too_large"


def test_two_in_turns_share_what_there_is(thin: Path) -> None:
    """Each of 0.6 of the memory: the newest is whole, and of the other the beginning stays."""
    with command("--model", str(thin), "--prompt-memory-bytes", str(20_800 * TOKEN_BYTES)) as (_, url):
        one, other = Conversation(url, 0, 0.4), Conversation(url, 5, 0.4)
        one.turn()
        other.turn()
        for conversation in (one, other, one):
            prompt, reused, before = conversation.turn()
            assert prompt > reused > 20_800 - before - 2_000
        prompt, reused, before = one.turn()
        assert reused >= before - 1
