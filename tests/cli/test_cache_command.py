"""`mlx-kv cache`, and `generate` with the file that it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from going_on import feed
from mlx_lm.models import cache as stock

import mlx_kv
from mlx_kv import (
    make_prompt_cache,
    save_prompt_cache,
)
from mlx_kv.files import tensor_files
from mlx_kv.files.serialization import VERSION_WORD, load_prompt_file, model_fingerprint
from mlx_kv.generation.encoding import encode_beginning, encode_ending
from mlx_kv.mlxlm.loading import load

TEXT = (
    (Path(mlx_kv.__file__).parent / "cache" / "growth.py")
    .read_text()
    .partition("\n\n\n@dataclass(frozen=True)\nclass G")[0]
)
REST = "\n\n\ndef double(slots: int) -> int:\n"


@pytest.fixture
def call(command: Any) -> Any:
    return command


POLICY_OPTIONS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "quantised": ("--kv-bits", "8"),
    "ring": ("--max-kv-size", "200", "--max-write", "64"),
    "budget": ("--kv-budget", "300"),
}


@pytest.mark.parametrize("options", POLICY_OPTIONS)
@pytest.mark.slow
def test_a_cached_prompt_is_gone_on_from(options: str, call: Any, tmp_path: Path, reference: Any) -> None:
    tokenizer = reference[1]
    ids = tokenizer.encode(TEXT), tokenizer.encode(REST, add_special_tokens=False)
    assert [*ids[0], *ids[1]] == tokenizer.encode(TEXT + REST), "this text splits at another place"
    path = tmp_path / "p.safetensors"
    (tmp_path / "prompt.py").write_text(TEXT)
    made = call("cache", "--prompt-file", tmp_path / "prompt.py", "--output", path, *POLICY_OPTIONS[options])
    assert (made.code, made.out) == (0, "")
    for words in (f"{len(ids[0]):,} tokens", "tokens/s", "live", str(path)):
        assert words in made.err
    file = load_prompt_file(path)
    assert (file.tokens, file.metadata) == (ids[0], {"model": "reference"})
    common = ("--max-tokens", "24", "--json")
    went_on = json.loads(call("generate", "--prompt-cache-file", path, "--prompt", REST, *common).out)
    whole = json.loads(call("generate", "--prompt", TEXT + REST, *common, *POLICY_OPTIONS[options]).out)
    assert went_on["tokens"] == whole["tokens"]
    assert (went_on["cached_tokens"], went_on["prompt_tokens"]) == (len(ids[0]), len(ids[1]))
    assert whole["cached_tokens"] == 0


def test_room_is_made_for_what_follows_a_cached_prompt_and_no_more(call: Any, tmp_path: Path, reference: Any) -> None:
    """1,000 tokens and more: twice the room of what was loaded would show."""
    path, bytes_per_slot = tmp_path / "p.safetensors", 4 * 2 * 2 * 64 * 4
    call("cache", "--prompt", "import os\n" * 340, "--output", path)
    answer = json.loads(
        call("generate", "--prompt-cache-file", path, "--prompt", "import", "--max-tokens", "20", "--json").out
    )
    held = answer["cached_tokens"] + answer["prompt_tokens"] + 20
    assert answer["cached_tokens"] <= 1024 < held
    assert answer["kv_bytes_allocated"] == 1280 * bytes_per_slot


def test_in_a_chat_both_prompts_are_one_message() -> None:
    _, tokenizer = load(mlx_kv.model_path("reference"))
    tokenizer.chat_template = "{% for m in messages %}user:\n{{ m['content'] }}\n{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}answer:\n{% endif %}"
    begun = tokenizer.decode(encode_beginning(tokenizer, TEXT, chat=True))
    ended = tokenizer.decode(encode_ending(tokenizer, REST, chat=True))
    messages = [{"role": "user", "content": TEXT + REST}]
    assert begun == f"user:\n{TEXT}"
    assert begun + ended == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_a_file_of_mlx_lm_is_gone_on_from(call: Any, tmp_path: Path, reference: Any) -> None:
    model, tokenizer = reference
    caches = stock.make_prompt_cache(model)
    feed(model, caches, mx.array(tokenizer.encode(TEXT)), 512)
    path = tmp_path / "p.safetensors"
    stock.save_prompt_cache(str(path), caches, {"model": "reference", "tokenizer_config": "{}"})
    common = ("--max-tokens", "12")
    went_on = call("generate", "--prompt-cache-file", path, "--prompt", REST, *common)
    assert went_on.out == call("generate", "--prompt", TEXT + REST, *common).out
    stock.save_prompt_cache(str(path), caches, {"model": "mlx-community/other"})
    other = call("generate", "--prompt-cache-file", path, "--prompt", REST)
    assert (other.code, other.err.count("\n")) == (2, 1)
    assert "is a prompt cache of another model: give --model mlx-community/other" in other.err


def test_penalties_know_what_is_in_a_file(call: Any, tmp_path: Path) -> None:
    path, prompt = tmp_path / "p.safetensors", "import "
    assert call("cache", "--prompt", TEXT, "--output", path).code == 0
    penalty = ("--repetition-penalty", "3", "--max-tokens", "12", "--json")
    common = ("generate", "--prompt-cache-file", path, "--prompt", prompt, *penalty)
    plain, drafted = (json.loads(call(*common, *more).out)["tokens"] for more in ((), ("--draft", "ngram")))
    whole = json.loads(call("generate", "--prompt", TEXT + prompt, *penalty).out)["tokens"]
    assert plain == drafted == whole


@pytest.mark.parametrize("options", POLICY_OPTIONS)
@pytest.mark.slow
def test_drafts_without_a_model_go_on_from_a_file(options: str, call: Any, tmp_path: Path) -> None:
    """The file knows nothing of drafts; the drafter knows its text: the prompt alone has nothing that came before."""
    path, prompt = tmp_path / "p.safetensors", "\n\n\n@dataclass"
    assert call("cache", "--prompt", TEXT, "--output", path, *POLICY_OPTIONS[options]).code == 0
    common = ("generate", "--prompt-cache-file", path, "--prompt", prompt, "--max-tokens", "4", "--json")
    plain, drafted = (json.loads(call(*common, *more).out) for more in ((), ("--draft", "ngram")))
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["cached_tokens"] == plain["cached_tokens"] > 0
    assert drafted["drafted"] > 0


REFUSED = {
    "another model": (["generate", "--model", "draft", "--prompt-cache-file", "{p}"], "of another model"),
    "a policy": (["generate", "--kv-bits", "8", "--prompt-cache-file", "{p}"], "leave out --kv-bits"),
    "a draft": (["generate", "--draft-model", "reference", "--prompt-cache-file", "{p}"], "leave out --draft-model"),
    "no file": (["generate", "--prompt-cache-file", "{p}.not"], "does not exist"),
    "another file": (["generate", "--prompt-cache-file", "{weights}"], "no prompt cache"),
    "another version": (["generate", "--prompt-cache-file", "{version}"], "of version '7'"),
    "another tokenizer": (["generate", "--prompt-cache-file", "{tokenizer}"], "with another tokenizer"),
    "damaged": (["generate", "--prompt-cache-file", "{damaged}"], "was damaged"),
    "of no model": (["generate", "--prompt-cache-file", "{anonymous}"], "has no fingerprint of a model"),
    "no folder": (["cache", "--output", "{p}/nowhere/a.safetensors"], "there is no folder"),
    "no output": (["cache"], "Missing option '--output'"),
    "policy": (["cache", "--output", "{p}", "--kv-bits", "7"], "--kv-bits 7: "),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, reference: tuple[nn.Module, Any]) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    names = ("p", "version", "tokenizer", "damaged", "anonymous")
    paths = {name: folder / f"{name}.safetensors" for name in names}
    caches = make_prompt_cache(reference[0])
    feed(reference[0], caches, mx.array([1, 2, 3]), 3)
    own = model_fingerprint(*reference)
    save_prompt_cache(paths["p"], caches, tokens=[1, 2, 3], fingerprint=own)
    save_prompt_cache(paths["tokenizer"], caches, fingerprint=own[:33] + "0" * 32)
    save_prompt_cache(paths["anonymous"], caches)
    file = tensor_files.read(paths["p"])
    tensor_files.write(paths["version"], file.arrays, {**file.words, VERSION_WORD: "7"})
    damaged = bytearray(paths["p"].read_bytes())
    damaged[-9] ^= 4
    paths["damaged"].write_bytes(damaged)
    return {**paths, "weights": Path(mlx_kv.model_path("draft")) / "model.safetensors"}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_exit_code_2(case: str, call: Any, files: dict[str, Path]) -> None:
    arguments, message = REFUSED[case]
    done = call(*(argument.format(**files) for argument in arguments), "--prompt", "x")
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.startswith("mlx-kv: error: ")
    assert done.err.count("\n") == 1


def test_help_has_examples(call: Any) -> None:
    done = call("cache", "--help")
    assert done.code == 0
    assert "mlx-kv generate --prompt-cache-file" in done.out
