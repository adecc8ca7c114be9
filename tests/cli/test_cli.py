"""The command as a user meets it: a process, its two streams and its exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import click
import pytest

import mlx_kv
from mlx_kv.cache.residual import ROOM
from mlx_kv.cli.main import command as group
from mlx_kv.generation.generate import stream_generate
from mlx_kv.mlxlm.loading import load

PACKAGE = Path(mlx_kv.__file__).parent
GROWTH = PACKAGE / "cache" / "growth.py"


def run(*arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "mlx_kv.cli", *arguments],
        input=stdin,
        capture_output=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


@pytest.mark.slow
def test_text_goes_to_stdout_and_statistics_to_stderr() -> None:
    done = run("generate", "--prompt-file", str(GROWTH), "--max-tokens", "20")
    assert done.returncode == 0
    wanted = stream_generate(*load(mlx_kv.model_path("reference")), GROWTH.read_text(), max_tokens=20)
    assert done.stdout == "".join(r.text for r in wanted) + "\n"
    for words in ("tokens/s", "KV cache", "live", "allocated", "growths", "peak memory"):
        assert words in done.stderr
    assert "%|" not in done.stderr  # no progress bar where nobody looks


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [("--prefill-step-size", "100"), ()], ids=["many", "one"])
def test_a_long_prompt_shows_its_progress_on_a_terminal(chunks: tuple[str, ...]) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 100))
    arguments = (
        "generate",
        "--prompt-file",
        str(GROWTH),
        "--max-tokens",
        "2",
        *chunks,
    )
    process = subprocess.Popen([sys.executable, "-m", "mlx_kv.cli", *arguments], stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # how a terminal says that its other side has gone
        while part := os.read(ours, 4096):
            seen += part
    assert process.wait(timeout=300) == 0
    assert b"prompt:" in seen
    assert b"%|" in seen
    assert b"  0%|" in seen  # from the start on


@pytest.mark.parametrize("draft", [(), ("--draft-model", "reference"), ("--draft", "ngram")])
def test_a_rate_is_said_of_what_was_timed(draft: tuple[str, ...], command: Any) -> None:
    """The first tokens are there when the clock of generation starts: one alone took no time."""
    common = ("generate", "--prompt", "import os\n", *draft)
    one, some = (command(*common, "--max-tokens", count) for count in ("1", "12"))
    (line,) = [line for line in one.err.splitlines() if line.startswith("generation")]
    assert line.split() == ["generation", "1", "token"]
    (line,) = [line for line in some.err.splitlines() if line.startswith("generation")]
    assert line.endswith("tokens/s")
    answer = json.loads(command(*common, "--max-tokens", "1", "--json").out)
    assert (answer["generation_tokens"], answer["generation_tokens_per_second"]) == (1, None)


@pytest.mark.slow
def test_json_is_one_object_and_options_reach_the_caches() -> None:
    common = ("generate", "-", "--max-tokens", "8", "--json")
    plain, packed = (json.loads(run(*common, *more, stdin=b"import os\n").stdout) for more in ((), ("--kv-bits", "8")))
    assert plain["generation_tokens"] == len(plain["tokens"]) == 8
    assert plain["finish_reason"] == "length"
    held = plain["prompt_tokens"] + 8
    assert plain["kv_bytes_live"] == held * 4 * 2 * 2 * 64 * 4
    assert packed["kv_bytes_live"] == held * 4 * 2 * 2 * (64 + 2 * 4)
    assert plain["kv_growths"] == 0


# Bytes of keys and of values of 64 elements. With bits, a group has a scale and a bias of 4 bytes; else a scale of 1.
STORED: dict[str, tuple[tuple[str, ...], int]] = {
    "a pair": (("--kv-bits", "8,4"), (64 + 8) + (32 + 8)),
    "one of two": (("--kv-bits", "none,4"), 256 + (32 + 8)),
    "rotated": (("--kv-bits", "4", "--kv-rotate"), 2 * (32 + 8)),
    "rotated, one of two": (("--kv-bits", "4,none", "--kv-rotate"), (32 + 8) + 256),
    "groups": (("--kv-bits", "8,4", "--kv-group-size", "32"), (64 + 16) + (32 + 16)),
    "mxfp8": (("--kv-codec", "mxfp8"), 2 * (64 + 2)),
    "two codecs": (("--kv-codec", "mxfp8,nvfp4"), (64 + 2) + (32 + 4)),
    "two codecs, one with bits": (("--kv-codec", "rotated,mxfp4", "--kv-bits", "8,none"), (64 + 8) + (32 + 2)),
}


def test_the_newest_as_they_came_take_a_ring_beside_the_others(command: Any) -> None:
    asked = ("generate", "--prompt", "import os\n", "--max-tokens", "3", "--json", "--kv-bits", "4", "--kv-rotate")
    without, beside = (json.loads(command(*asked, *more).out) for more in ((), ("--kv-residual", "8")))
    assert beside["kv_bytes_live"] - without["kv_bytes_live"] == 4 * 2 * (8 + ROOM + 1) * 512


@pytest.mark.parametrize("kind", STORED)
def test_bits_apart_and_codecs_reach_the_caches(kind: str, command: Any) -> None:
    options, per_head = STORED[kind]
    done = command("generate", "--prompt", "import os\n", "--max-tokens", "3", "--json", *options)
    answer = json.loads(done.out)
    assert answer["kv_bytes_live"] == (answer["prompt_tokens"] + 3) * 4 * 2 * per_head


@pytest.mark.slow
def test_a_draft_model_changes_the_speed_and_not_the_text() -> None:
    common = ("generate", "--prompt-file", str(GROWTH), "--max-tokens", "24", "--json")
    plain, drafted = (
        json.loads(run(*common, *more).stdout)
        for more in ((), ("--draft-model", "reference", "--num-draft-tokens", "4"))
    )
    assert drafted["text"] == plain["text"]
    assert drafted["tokens"] == plain["tokens"]
    assert 0 < drafted["accepted"] <= drafted["drafted"]
    done = run(*common[:-1], "--draft-model", "reference")
    assert "accepted in" in done.stderr


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "auto"])
@pytest.mark.slow
def test_drafts_without_a_model_change_the_speed_and_not_the_text(drafter: str, command: Any) -> None:
    common = ("generate", "--prompt-file", str(GROWTH), "--max-tokens", "30", "--json")
    plain, drafted = (json.loads(command(*common, *more).out) for more in ((), ("--draft", drafter)))
    assert drafted["tokens"] == plain["tokens"]
    assert "drafted" not in plain
    assert 0 < drafted["accepted"] <= drafted["drafted"]
    assert drafted["tokens_per_pass"] == round(30 / drafted["passes"], 2) > 1
    assert {"draft_length", "draft_gain"} <= drafted.keys()
    sampled = ("--temp", "0.5", "--seed", "3")
    plain, drafted = (json.loads(command(*common, *more, *sampled).out) for more in ((), ("--draft", drafter)))
    assert drafted["tokens"] == plain["tokens"]


@pytest.mark.slow
def test_max_kv_size_bounds_what_is_live() -> None:
    common = ("generate", "--prompt-file", str(GROWTH), "--max-tokens", "4", "--json")
    held = json.loads(run(*common, "--max-kv-size", "300", "--max-write", "100").stdout)
    assert held["kv_bytes_live"] == 300 * 4 * 2 * 2 * 64 * 4
    assert held["kv_bytes_allocated"] == 512 * 4 * 2 * 2 * 64 * 4


@pytest.mark.slow
def test_a_seed_repeats_and_another_does_not() -> None:
    options = ("generate", "--prompt", "class ", "--max-tokens", "12", "--temp", "1.0", "--top-p", "0.95")
    first, again, other = (run(*options, "--seed", seed).stdout for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


BAD = {
    "unknown option": (["generate", "--prompt", "x", "--frobnicate"], "No such option"),
    "unknown command": (["degenerate"], "No such command"),
    "no prompt": (["generate"], "no prompt: give --prompt, --prompt-file or -"),
    "two prompts": (["generate", "--prompt", "x", "-"], "more than one prompt"),
    "stray argument": (["generate", "notes.txt"], "unexpected argument 'notes.txt'"),
    "missing file": (["generate", "--prompt-file", "nowhere.py"], "'nowhere.py' does not exist"),
    "empty prompt": (["generate", "--prompt", "  "], "the prompt is empty"),
    "empty stdin": (["generate", "-"], "the prompt is empty"),
    "bits": (
        ["generate", "--prompt", "x", "--kv-bits", "7"],
        "error: --kv-bits 7: a quantised cache has 2, 3, 4, 5, 6, 8 bits",
    ),
    "bits of one of two": (
        ["generate", "--prompt", "x", "--kv-bits", "8,7"],
        "error: --kv-bits 7: a quantised cache has 2, 3, 4, 5, 6, 8 bits",
    ),
    "bits of three": (["generate", "--prompt", "x", "--kv-bits", "8,4,2"], "'8,4,2': give one, or two with a comma"),
    "bits in words": (
        ["generate", "--prompt", "x", "--kv-bits", "8,many"],
        "'many' is not a number of bits: give 8, or 8,4",
    ),
    "no bits": (["generate", "--prompt", "x", "--kv-bits", "none"], "'none' is not a number of bits"),
    "no codec": (["generate", "--prompt", "x", "--kv-codec", "nobody"], "there is no codec 'nobody': choose one of"),
    "rotated by what": (
        ["generate", "--prompt", "x", "--kv-rotate"],
        "--kv-rotate needs --kv-bits: give a number, such as 8",
    ),
    "rotated codec": (
        ["generate", "--prompt", "x", "--kv-bits", "8,none", "--kv-codec", "rotated"],
        "--kv-codec rotated needs --kv-bits: give a number, such as 8",
    ),
    "rotated twice": (
        ["generate", "--prompt", "x", "--kv-bits", "8", "--kv-rotate", "--kv-codec", "mxfp8"],
        "--kv-rotate is short for --kv-codec rotated: give one of them",
    ),
    "bits and a codec": (
        ["generate", "--prompt", "x", "--kv-bits", "8", "--kv-codec", "mxfp8"],
        "got --kv-bits 8 and --kv-codec mxfp8, which both describe how tensors are stored: give one of them, or "
        "--kv-codec rotated",
    ),
    "group": (
        ["generate", "--prompt", "x", "--kv-bits", "8", "--kv-group-size", "7"],
        "error: --kv-group-size 7: choose",
    ),
    "group and head dim": (
        ["generate", "--prompt", "x", "--kv-bits", "8", "--kv-group-size", "128"],
        "head dim 64, not a multiple of --kv-group-size 128; use --kv-group-size 32 or 64",
    ),
    "start without bits": (
        ["generate", "--prompt", "x", "--quantized-kv-start", "9"],
        "--quantized-kv-start 9, but --kv-bits is not given",
    ),
    "growth": (["generate", "--prompt", "x", "--kv-growth", "magic"], "'magic' is not one of"),
    "no room": (["generate", "--prompt", "x", "--max-kv-size", "0"], "error: --max-kv-size 0: "),
    "no windows": (
        ["generate", "--prompt", "x", "--max-write", "9"],
        "no layer of this model can honour --max-write: ",
    ),
    "no drafts": (
        ["generate", "--prompt", "x", "--draft-model", "reference", "--num-draft-tokens", "0"],
        "error: --num-draft-tokens 0: ",
    ),
    "nobody": (["generate", "--prompt", "x", "--draft", "nobody"], "choose one of auto, model, mtp, ngram, suffix, "),
    "no head": (["generate", "--prompt", "x", "--draft", "mtp"], "give --draft-head with the repository"),
    "a head that is none": (
        ["generate", "--prompt", "x", "--draft-head", "/nowhere/at/all"],
        "is no directory, and cannot be read from the hub",
    ),
    "a head and a model": (
        ["generate", "--prompt", "x", "--draft-head", "x", "--draft-model", "reference"],
        "got --draft-model and --draft-head: give one of them",
    ),
    "a head and a drafter": (
        ["generate", "--prompt", "x", "--draft-head", "x", "--draft", "suffix"],
        "--draft suffix drafts without a head: leave out --draft-head, or --draft",
    ),
    "a model for mtp": (
        ["generate", "--prompt", "x", "--draft", "mtp", "--draft-model", "reference"],
        "--draft mtp drafts with a head of the model: leave out --draft-model, or --draft",
    ),
    "no model": (["generate", "--prompt", "x", "--draft", "model"], "a model: give --draft-model"),
    "a model for nothing": (
        ["generate", "--prompt", "x", "--draft", "ngram", "--draft-model", "reference"],
        "--draft ngram drafts without a model: leave out --draft-model, or --draft",
    ),
    "nothing to look up": (
        ["generate", "--prompt", "x", "--draft-model", "reference", "--prompt-lookup-min", "2"],
        "--prompt-lookup-min needs --draft ngram, suffix or auto",
    ),
    "more than all": (
        ["generate", "--prompt", "x", "--draft", "ngram", "--prompt-lookup-min", "5"],
        "error: --prompt-lookup-min 5, more than --prompt-lookup-max 4: give a smaller one",
    ),
    "no drafts of a server": (
        ["serve", "--draft", "auto", "--num-draft-tokens", "0"],
        "error: --num-draft-tokens 0: ",
    ),
    "drafts of a server by nobody": (
        ["serve", "--num-draft-tokens", "2"],
        "needs --draft, --draft-head or --draft-model",
    ),
    "seed": (
        ["generate", "--prompt", "x", "--seed", "-1"],
        "--seed -1: give a whole number from 0 to 18,446,744,073,709,551,615",
    ),
    "no tokens": (["generate", "--prompt", "x", "--max-tokens", "0"], "0 is not in the range"),
    "temperature": (["generate", "--prompt", "x", "--temp", "-1"], "--temp -1.0: give a number from 0 up"),
    "no temperature": (["generate", "--prompt", "x", "--temp", "nan"], "--temp nan: give a number from 0 up"),
    "endless temperature": (["generate", "--prompt", "x", "--temp", "1e400"], "--temp inf: give a number from 0 up"),
    "no top-p": (["generate", "--prompt", "x", "--top-p", "nan"], "--top-p nan: give a number above 0 up to 1"),
    "no penalty": (
        ["generate", "--prompt", "x", "--presence-penalty", "-inf"],
        "--presence-penalty -inf: give a finite number",
    ),
    "no temperature of a server": (["serve", "--temp", "nan"], "--temp nan: give a number from 0 to 2"),
    "folder without config": (["generate", "--prompt", "x", "--model", "{empty}"], "has no config.json"),
    "a file for a model": (["generate", "--prompt", "x", "--model", "{binary}"], "is a file: give the directory"),
    "no such model": (["generate", "--prompt", "x", "--model", "nowhere"], "neither a directory nor a hub id"),
    "nowhere on the disk": (["generate", "--prompt", "x", "--model", "/nowhere"], "neither a directory nor a hub id"),
    "broken config": (["generate", "--prompt", "x", "--model", "{broken}"], "cannot load"),
    "binary prompt": (["generate", "--prompt-file", "{binary}"], "not UTF-8 text"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    case: str, tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, message = BAD[case]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    places = {name: str(tmp_path / name) for name in ("empty", "broken", "binary")}
    done = command(*(a.format(**places) if a.startswith("{") else a for a in arguments))
    assert done.code == 2, done.err
    assert message in done.err
    assert done.err.startswith("mlx-kv: error: ")
    assert done.err.count("\n") == 1, done.err
    assert done.out == ""


def test_a_prompt_beyond_what_the_model_was_made_for_is_noted(tmp_path: Path, command: Any) -> None:
    shutil.copytree(PACKAGE / "models" / "draft", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 100}))
    common = ("--model", tmp_path / "model", "--prompt", "import os\n" * 40)  # 3 tokens each
    for asked, *arguments in (
        ("120 + 1", "generate", *common, "--max-tokens", "1"),
        ("120", "cache", *common, "--output", tmp_path / "long.safetensors"),
        ("120", "inspect", *common, "--kv-budget", "90", "--kv-keep-recent", "8"),
    ):
        done = command(*arguments)
        assert done.code == 0
        assert f"mlx-kv: note: {asked} tokens, but this model was made for 100\n" in done.err


def test_the_bare_command_prints_its_help() -> None:
    done = run()
    assert done.returncode == 2
    assert "Usage:" in done.stderr
    assert done.stderr.count("\n") > 5


@pytest.mark.slow
def test_a_broken_model_is_one_line(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE / "models" / "draft", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x00" * 100)
    for config in (None, "[]", '{"model_type": "llama"}'):
        if config is not None:
            (tmp_path / "model" / "config.json").write_text(config)
        done = run("generate", "--prompt", "x", "--model", str(tmp_path / "model"))
        assert done.returncode == 2
        assert done.stderr.startswith("mlx-kv: error: mlx-lm cannot load ")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"]])
def test_help_has_examples(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 0
    assert "Examples:" in done.stdout
    assert "mlx-kv generate --prompt" in done.stdout


@pytest.mark.parametrize("name", [None, *group.commands])
def test_help_shows_no_value_of_python(name: str | None) -> None:
    """Such as the bound of a range that has none."""
    command = group if name is None else group.commands[name]
    text = command.get_help(click.Context(command, info_name=name))
    assert "--help" in text
    assert re.findall(r"\b(?:None|inf|nan|Sentinel|UNSET|lambda|function|object at)\b|<(?:class|enum)", text) == []


def test_info_says_what_is_installed() -> None:
    done = run("info")
    assert done.returncode == 0
    for words in ("mlx-kv", "mlx-lm", "device", "BLAS", "GFLOP/s", "reference", "draft"):
        assert words in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a BLAS is loaded ahead of MLX on Linux only")
def test_blas_can_be_chosen_and_a_missing_one_is_said() -> None:
    assert "bundled reference BLAS (MLX_KV_BLAS=none)" in run("info", MLX_KV_BLAS="none").stdout
    assert "(libnowhere.so cannot be loaded)" in run("info", MLX_KV_BLAS="libnowhere.so").stdout


def test_importing_the_package_does_not_import_mlx() -> None:
    """Otherwise no BLAS could be loaded ahead of it."""
    code = "import sys, mlx_kv, mlx_kv.blas; assert 'mlx.core' not in sys.modules; mlx_kv.KVCache; print(dir(mlx_kv))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "stream_generate" in done.stdout
    for name in mlx_kv.__all__:
        assert getattr(mlx_kv, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mlx_kv.nothing  # noqa: B018
