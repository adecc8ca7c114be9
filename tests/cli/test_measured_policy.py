"""What a calibration decides of a policy: `--kv-bits auto` and centred keys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mlx_kv
from mlx_kv.bundled import model_path
from mlx_kv.cache.eviction.calibration import BitsLoss
from mlx_kv.calibration.loss import bytes_per_token
from mlx_kv.files.calibration_file import beside

ASKED = ("generate", "--prompt", "import os\n", "--max-tokens", "3", "--json")


@pytest.fixture(scope="module")
def made() -> mlx_kv.Calibration:
    """Of the draft model, on short texts, with made-up losses."""
    network, tokenizer = mlx_kv.load(model_path("draft"))
    calibration = mlx_kv.calibrate(network, tokenizer, [[5 + i, 6, 7, 8] * 16 for i in range(6)])
    losses = [BitsLoss(4, 4, 64, "rotated", 700, 0.5, 0.25), BitsLoss(8, 4, 32, None, 900, 0.0, 0.005)]
    return replace(calibration, losses=tuple(losses))


@pytest.fixture
def calibrated(model: Path, made: mlx_kv.Calibration) -> Path:
    """The draft model with its calibration beside it."""
    mlx_kv.save_calibration(beside(model), made)
    return model


def bytes_of(done: Any) -> float:
    answer = json.loads(done.out)
    return float(answer["kv_bytes_live"] / (answer["prompt_tokens"] + 3))


@pytest.mark.parametrize(
    ("max_loss", "policy", "says"),
    [
        (None, mlx_kv.CachePolicy(bits=(8, 4), group_size=32), "--kv-bits 8,4 --kv-group-size 32"),
        ("0.75", mlx_kv.CachePolicy(bits=4, codec="rotated"), "--kv-bits 4 --kv-rotate"),
        ("0.001", mlx_kv.CachePolicy(), "nothing quantised"),
    ],
)
def test_bits_are_those_that_the_calibration_bears(
    max_loss: str | None, policy: mlx_kv.CachePolicy, says: str, calibrated: Path, command: Any
) -> None:
    bound = () if max_loss is None else ("--max-loss", max_loss)
    done = command(*ASKED, "--model", calibrated, "--kv-bits", "auto", *bound)
    assert done.code == 0, done.err
    assert f"--kv-bits auto is {says}, as mlx-kv calibrate measured" in done.err
    network, _ = mlx_kv.load(str(calibrated))
    assert bytes_of(done) == bytes_per_token(network, policy)


def test_without_a_calibration_or_its_losses_the_command_to_run_is_named(
    model: Path, made: mlx_kv.Calibration, command: Any
) -> None:
    for options in (("--kv-bits", "auto"), ("--kv-bits", "4", "--kv-codec", "centred")):
        done = command(*ASKED, "--model", model, *options)
        assert (done.code, done.out) == (2, "")
        what = " ".join(options[-2:])
        assert f"{what} needs a calibration of this model, and none was found: run mlx-kv calibrate {model}" in done.err
    mlx_kv.save_calibration(beside(model), replace(made, losses=(), centres=()))
    assert (
        "this calibration has no losses of bits: run mlx-kv calibrate anew"
        in command(*ASKED, "--model", model, "--kv-bits", "auto").err
    )
    done = command(*ASKED, "--model", model, "--kv-bits", "4", "--kv-codec", "centred")
    assert "this calibration has no centres of keys: run mlx-kv calibrate anew" in done.err


def test_centred_keys_take_as_many_bytes_and_go_into_files(calibrated: Path, command: Any, tmp_path: Path) -> None:
    bits = ("--model", calibrated, "--kv-bits", "4")
    done = command(*ASKED, *bits, "--kv-codec", "centred")
    rotated = command(*ASKED, *bits, "--kv-rotate")
    assert bytes_of(done) == bytes_of(rotated)
    file = tmp_path / "kept.safetensors"
    for codec, names in (("centred", ["centred", "rotated"]), ("centred,affine", ["centred", "affine"])):
        command("cache", "--prompt", "import os\n", "--output", file, "--force", *bits, "--kv-codec", codec)
        caches = mlx_kv.load_prompt_cache(file)
        assert [each.name for each in caches[0].view.codecs] == names
        assert caches[0].view.codecs[0] != caches[1].view.codecs[0]


def test_inspect_and_plan_take_them_too(calibrated: Path, command: Any) -> None:
    inspected = command("inspect", "--model", calibrated, "--prompt", "import os\n" * 40, "--kv-budget", "40",
                        "--kv-keep-recent", "8", "--kv-bits", "auto")  # fmt: skip
    assert inspected.code == 0, inspected.err
    options = ("plan", "--model", calibrated, "--kv-bits", "auto")
    planned = command(*options, "--kv-calibration", beside(calibrated))
    assert "bits=(8, 4)" in planned.out
    assert "--kv-bits auto needs a calibration: give --kv-calibration FILE" in command(*options).err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--max-loss", "1"), "--max-loss is for --kv-bits auto: give that, too, or leave out --max-loss"),
        (("--loss-text", "TEXT"), "--loss-text was removed in 0.4: mlx-kv calibrate MODEL measures what bits cost"),
        (("--kv-bits", "auto", "--kv-rotate"), "--kv-bits auto chooses the value of --kv-rotate, too"),
        (("--kv-bits", "auto", "--kv-group-size", "32"), "leave out --kv-group-size"),
        (("--kv-bits", "auto", "--kv-codec", "centred"), "leave out --kv-codec"),
        (("--kv-bits", "auto", "--max-loss", "-1"), "--max-loss"),
        (("--kv-bits", "auto", "--kv-calibration", "none"), "--kv-bits auto needs a calibration: leave out"),
        (("--kv-codec", "centred"), "--kv-codec centred needs --kv-bits: give a number, such as 4"),
        (("--kv-codec", "centred", "--kv-bits", "none,4"), "--kv-codec centred needs --kv-bits"),
        (("--kv-codec", "plain,centred", "--kv-bits", "4"), "keys are centred, values are not"),
        (("--kv-bits", "auto,4"), "'auto' is not a number of bits"),
    ],
)
def test_what_does_not_go_together_is_refused(options: tuple[str, ...], says: str, command: Any) -> None:
    done = command(*ASKED, *options)
    assert done.code == 2
    assert says in done.err
    assert done.out == ""


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
