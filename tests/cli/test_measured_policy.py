"""What of a policy is measured on the model: `--kv-bits auto` and centred keys, said, remembered, and compared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import mlx_kv
from mlx_kv.bundled import model_path
from mlx_kv.calibration.storage import bytes_per_token, choose_bits, tokens_of
from mlx_kv.settings import option_value

ASKED = ("generate", "--prompt", "import os\n", "--max-tokens", "3", "--json")
TEXT = "\n".join(Path(mlx_kv.__file__).read_text(encoding="utf-8").splitlines()[20:45])


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "remembered"))
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


@pytest.mark.parametrize("max_loss", [0.02, 1e9])
def test_what_is_chosen_is_what_the_library_chooses(max_loss: float, text: Path, command: Any) -> None:
    done = command(*ASKED, "--kv-bits", "auto", "--max-loss", max_loss, "--loss-text", text)
    answer = json.loads(done.out)
    model, tokenizer = mlx_kv.load(model_path("reference"))
    tokens = tokens_of(tokenizer, [TEXT])
    policy = choose_bits(model, tokens, max_loss)
    assert answer["kv_bytes_live"] == (answer["prompt_tokens"] + 3) * bytes_per_token(model, policy)
    measuring, chosen = done.err.splitlines()[:2]
    assert measuring.endswith(
        f"measuring what each number of bits costs on {len(tokens)} tokens of a text, once for this model"
    )
    assert f"--kv-bits auto is --kv-bits {option_value(policy.bits)}" in chosen
    assert re.search(
        rf" \+?-?[\d.]+ ± [\d.]+ nats a token on {len(tokens)} tokens \(measured now\), [\d,]+ bytes a token instead",
        chosen,
    )


def test_a_second_run_remembers(text: Path, command: Any, tmp_path: Path) -> None:
    again = ("--kv-bits", "auto", "--max-loss", "1e9", "--loss-text", text)
    first, second = (command(*ASKED, *again) for _ in range(2))
    assert json.loads(first.out)["tokens"] == json.loads(second.out)["tokens"]
    assert "(measured now)" in first.err
    assert "(as measured before)" in second.err
    assert "measuring" not in second.err
    text.write_text(TEXT + " and more", encoding="utf-8")  # another text
    assert "(measured now)" in command(*ASKED, *again).err
    folder = tmp_path / "remembered" / "mlx-kv"
    (file,) = folder.iterdir()
    file.write_text("somebody else's")
    assert "(measured now, and cannot be stored)" in command(*ASKED, *again).err
    assert file.read_text() == "somebody else's"


def test_the_newest_as_they_came_are_measured_so(text: Path, command: Any) -> None:
    again = (*ASKED, "--kv-bits", "auto", "--max-loss", "1e9", "--loss-text", text)
    assert "(measured now)" in command(*again).err
    done = command(*again, "--kv-residual", "16")
    assert "--kv-residual 16: +" in done.err or "--kv-residual 16: -" in done.err
    assert "(measured now)" in done.err  # what was measured without them is of something else
    assert "(as measured before)" in command(*again, "--kv-residual", "16").err


def test_where_no_bits_are_borne_all_stays_plain(text: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_kv.calibration.storage.CodecLoss.added", lambda self, policy: Cost())
    done = command(*ASKED, "--kv-bits", "auto", "--loss-text", text)
    answer = json.loads(done.out)
    assert answer["kv_bytes_live"] == answer["kv_bytes_full"]
    assert "no bits are within 0.01 nats a token, 0.7500 at the least" in done.err
    assert done.err.count("nothing is quantised") == 1


class Cost:
    nats, error = 0.5, 0.25


def test_centred_keys_take_as_many_bytes_and_go_into_files(text: Path, command: Any, tmp_path: Path) -> None:
    bits = ("--kv-bits", "4", "--loss-text", text)
    done = command(*ASKED, *bits, "--kv-codec", "centred")
    rotated = command(*ASKED, "--kv-bits", "4", "--kv-rotate")
    assert json.loads(done.out)["kv_bytes_live"] == json.loads(rotated.out)["kv_bytes_live"]
    assert "measuring the means of keys" in done.err
    file = tmp_path / "kept.safetensors"
    for codec, names in (("centred", ["centred", "rotated"]), ("centred,affine", ["centred", "affine"])):
        command("cache", "--prompt", "import os\n", "--output", file, "--force", *bits, "--kv-codec", codec)
        caches = mlx_kv.load_prompt_cache(file)
        assert [each.name for each in caches[0].view.codecs] == names
        assert caches[0].view.codecs[0] != caches[1].view.codecs[0]
    went_on = command("generate", "--prompt-cache-file", file, "--prompt", "import sys", "--max-tokens", "3")
    assert "cached" in went_on.err


def test_answers_of_a_file_are_of_what_was_asked_for(text: Path, command: Any, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "import os", "max_tokens": 3}\n')
    asked = ("batch", "--prompts", prompts, "--output", output, "--loss-text", text, "--kv-bits", "auto", "--max-loss")
    assert "measuring" in command(*asked, "0.02").err
    assert "measuring" not in command(*asked, "0.02").err  # all is answered, and no model is loaded
    output.unlink()
    command(*asked[:-1])
    assert command(*asked, "0.01").code == 0  # which is meant where nobody says
    assert command(*asked, "1e9").code != 0  # of other settings


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--max-loss", "1"), "--max-loss is for --kv-bits auto: give that, too, or leave out --max-loss"),
        (("--kv-bits", "8", "--loss-text", "TEXT"), "--loss-text is for --kv-bits auto, or --kv-codec centred"),
        (("--kv-bits", "auto", "--kv-rotate"), "--kv-bits auto chooses the value of --kv-rotate, too"),
        (("--kv-bits", "auto", "--kv-group-size", "32"), "leave out --kv-group-size"),
        (("--kv-bits", "auto", "--kv-codec", "centred"), "leave out --kv-codec"),
        (("--kv-bits", "auto", "--max-loss", "-1"), "--max-loss"),
        (("--kv-codec", "centred"), "--kv-codec centred needs --kv-bits: give a number, such as 4"),
        (("--kv-codec", "centred", "--kv-bits", "none,4"), "--kv-codec centred needs --kv-bits"),
        (("--kv-codec", "plain,centred", "--kv-bits", "4"), "keys are centred, values are not"),
        (("--kv-bits", "auto", "--loss-text", "EMPTY"), "a text of 0 tokens is too short to measure a loss"),
        (
            ("--kv-codec", "centred", "--kv-bits", "4", "--loss-text", "EMPTY"),
            "is too short to measure keys: give 64 or more",
        ),
        (("--kv-bits", "auto", "--loss-text", "BYTES"), "is not UTF-8 text: give another file with --loss-text"),
        (("--kv-bits", "auto,4"), "'auto' is not a number of bits"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: tuple[str, ...], says: str, text: Path, command: Any, tmp_path: Path
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    files = {"TEXT": text, "EMPTY": tmp_path / "empty", "BYTES": tmp_path / "bytes"}
    done = command(*ASKED, *(files.get(option, option) for option in options))
    assert done.code == 2
    assert says in done.err
    assert done.out == ""


def test_commands_without_weights_say_so(command: Any) -> None:
    for options, says in (
        (("--kv-bits", "auto"), "--kv-bits auto is measured by commands that generate: give a number, such as 8"),
        (("--kv-bits", "4", "--kv-codec", "centred"), "give rotated, which takes as many bytes"),
    ):
        done = command("plan", "--model", "examples/gemma-4-31b", *options)
        assert (done.code, says in done.err) == (2, True)


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (("--kv-bits", "4"), True),
        (("--kv-bits", "8,4"), False),
        (("--kv-bits", "4", "--kv-residual", "64"), False),
        ((), False),
    ],
)
def test_few_bits_for_keys_of_a_small_model_are_warned_of(options: tuple[str, ...], warned: bool, command: Any) -> None:
    done = command(*ASKED, "--model", model_path("reference"), *options)
    assert ("often change the answers of models below a billion weights" in done.err) == warned
    assert "often change" not in command(*ASKED, *options).err  # the bundled model was measured
