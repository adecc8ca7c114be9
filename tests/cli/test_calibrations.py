"""A budget uses the calibration of its model: found, given, refused, or left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibrations import random_calibration

import mlx_kv
from mlx_kv import load, save_calibration
from mlx_kv.cache.eviction.calibration import Calibration
from mlx_kv.files.calibration_file import beside
from mlx_kv.files.serialization import model_fingerprint

Command = Callable[..., Any]
PROMPT = "import os\n\n" + "".join(f"def number_{n}(x):\n    return x + {n}\n" for n in range(24))
SMALL = ("--kv-budget", 24, "--kv-keep-recent", 8, "--kv-margin", 4, "--max-write", 16)
GENERATE = ("--prompt", PROMPT, *SMALL, "--max-tokens", 4)
NOTE = "chooses tokens far better after mlx-kv calibrate"


@pytest.fixture
def calibration(model: Path) -> Calibration:
    """Random weights, for the draft model."""
    network, tokenizer = load(str(model))
    caches = mlx_kv.make_prompt_cache(network)
    list(mlx_kv.stream_generate(network, tokenizer, [5], prompt_cache=caches, max_tokens=1))
    _, heads, _, dim = caches[0].keys.shape
    return random_calibration(heads, dim, len(caches), fingerprint=model_fingerprint(network))


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> list[mlx_kv.CachePolicy]:
    """Of the caches with a budget that commands make, one of each policy in a row."""
    from mlx_kv.generation import decode_batch

    found: list[mlx_kv.CachePolicy] = []

    made = decode_batch.make_prompt_cache

    def make(model: Any, policy: Any, **more: Any) -> Any:
        if policy.budget is not None and (not found or found[-1] != policy):
            found.append(policy)
        return made(model, policy, **more)

    monkeypatch.setattr(decode_batch, "make_prompt_cache", make)
    return found


def test_without_one_a_line_says_what_would_help(command: Command, model: Path, policies: Any) -> None:
    done = command("generate", "--model", model, *GENERATE)
    assert done.code == 0, done.err
    assert NOTE in done.err
    assert f"mlx-kv calibrate {model}" in done.err
    assert (policies[0].score, policies[0].share, policies[0].layers) == ("key_diff", "layers", "uniform")
    for chosen in (["--kv-score", "key_norm"], ["--kv-share", "layers"], ["--kv-calibration", "none"]):
        assert NOTE not in command("generate", "--model", model, *GENERATE, *chosen).err


@pytest.mark.slow
def test_one_that_is_found_is_used(
    command: Command, model: Path, calibration: Calibration, policies: Any, tmp_path: Path
) -> None:
    save_calibration(beside(model), calibration)
    done = command("generate", "--model", model, *GENERATE)
    assert done.code == 0, done.err
    assert NOTE not in done.err
    assert policies[0].calibration == calibration
    assert (policies[0].score, policies[0].share, policies[0].layers) == ("fitted", "head", "calibrated")
    command("generate", "--model", model, *GENERATE, "--kv-calibration", "none")
    assert policies[1].calibration is None
    command("generate", "--model", model, *GENERATE, "--kv-share", "layers", "--kv-score", "key_norm")
    assert (policies[2].score, policies[2].share, policies[2].layers) == ("key_norm", "layers", "uniform")
    command("generate", "--model", model, *GENERATE, "--kv-bits", 8, "--kv-residual", 4)
    assert (policies[3].share, policies[3].layers) == ("layer", "calibrated")  # heads that hold the same tokens
    elsewhere = tmp_path / "mine.safetensors"
    beside(model).rename(elsewhere)
    command("generate", "--model", model, *GENERATE, "--kv-calibration", elsewhere)
    assert policies[4].calibration == calibration


def test_one_that_loses_answers_is_used_where_it_is_named(
    command: Command, model: Path, calibration: Calibration, policies: Any
) -> None:
    def store(full: float, before: float, after: float) -> None:
        check = {"budget": 8, "before": before, "after": after}
        answers = {"context": 16, "questions": 24, "full": full, "budgets": [check]}
        save_calibration(beside(model), replace(calibration, details={"answers": answers}))

    unused = "note: --kv-budget does not use the calibration that was found, since fewer answers were right with it"
    store(1.0, 0.9, 0.4)
    assert unused in command("generate", "--model", model, *GENERATE).err
    assert (policies[0].calibration, policies[0].score) == (None, "key_diff")
    for named in (["--kv-calibration", beside(model)], ["--kv-score", "fitted"], ["--kv-layers", "calibrated"]):
        done = command("generate", "--model", model, *GENERATE, *named)
        assert (done.code, unused in done.err) == (0, False), done.err
        assert policies[-1].calibration == calibration
    for good in ((1.0, 0.4, 0.9), (0.2, 0.1, 0.0)):  # better, or of a model that does not understand the questions
        store(*good)
        assert unused not in command("generate", "--model", model, *GENERATE).err
        assert policies[-1].calibration == calibration


def test_inspect_shows_what_is_kept_with_one_that_loses_answers(
    command: Command, model: Path, calibration: Calibration, tmp_path: Path
) -> None:
    check = {"budget": 8, "before": 0.9, "after": 0.4}
    answers = {"context": 16, "questions": 24, "full": 1.0, "budgets": [check]}
    worse = replace(calibration, details={"answers": answers})

    def kept(stored: Calibration, name: str, *words: Any) -> tuple[Any, str]:
        save_calibration(beside(model), stored)
        done = command("inspect", "--model", model, "--prompt", PROMPT, *SMALL, *words, "--json", tmp_path / name)
        assert done.code == 0, done.err
        return json.loads((tmp_path / name).read_text()), done.err

    for words in (["--scores", "fitted,key_diff"], ["--kv-score", "fitted"]):
        (same, _), (found, err) = kept(calibration, "good.json", *words), kept(worse, "worse.json", *words)
        assert (found, "does not use" in err) == (same, False)
    found, err = kept(worse, "found.json")
    assert "note: --kv-budget does not use the calibration that was found" in err
    beside(model).unlink()
    done = command("inspect", "--model", model, "--prompt", PROMPT, *SMALL, "--json", tmp_path / "none.json")
    assert (done.code, json.loads((tmp_path / "none.json").read_text())) == (0, found)


def test_a_check_of_answers_that_is_none_is_refused(model: Path, calibration: Calibration) -> None:
    save_calibration(beside(model), replace(calibration, details={"answers": {"full": 1.0, "budgets": 3}}))
    with pytest.raises(ValueError, match="was damaged"):
        mlx_kv.load_calibration(beside(model))


def test_one_of_another_model_is_ignored_or_refused(
    command: Command, model: Path, calibration: Calibration, policies: Any
) -> None:
    save_calibration(beside(model), replace(calibration, fingerprint="another"))
    assert NOTE in command("generate", "--model", model, *GENERATE).err
    assert policies[0].calibration is None
    done = command("generate", "--model", model, *GENERATE, "--kv-calibration", beside(model))
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert "is a calibration of another model: run mlx-kv calibrate" in done.err
    network, _ = load(str(model))
    policy = mlx_kv.CachePolicy(budget=100, calibration=replace(calibration, fingerprint=""))
    with pytest.raises(ValueError, match="of another model"):
        mlx_kv.make_prompt_cache(network, policy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-layers", "calibrated"], "--kv-layers calibrated needs a calibration of this model"),
        (["--kv-score", "fitted"], "--kv-score fitted needs a calibration of this model"),
        (["--kv-score", "fitted", "--kv-calibration", "none"], "leave out --kv-calibration none"),
        (["--kv-layers", "calibrated", "--kv-share", "layers"], "leave out one of them"),
        (["--kv-layers", "global"], "--kv-layers global, which was removed in 0.4: use --kv-layers calibrated, with a"),
        (["--kv-layers", "pyramid"], "--kv-layers pyramid, which was removed in 0.4: use --kv-layers calibrated"),
        (["--kv-score", "h2o"], "--kv-score h2o, which was removed in 0.4: use --kv-score snap_kv or a calibration"),
        (["--kv-calibration", "nowhere"], "cannot read --kv-calibration nowhere: No such file"),
    ],
)
def test_what_is_refused(command: Command, model: Path, options: list[str], message: str) -> None:
    done = command("generate", "--model", model, *GENERATE, *options)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_a_calibration_without_a_budget_is_refused(command: Command, model: Path) -> None:
    done = command("generate", "--model", model, "--prompt", PROMPT, "--kv-calibration", "x")
    assert (done.code, done.err.splitlines()[-1][-60:]) != (0, "")
    assert "give --kv-budget" in done.err


def test_budgets_without_weights_keep_by_key_diff(
    command: Command, model: Path, calibration: Calibration, policies: Any
) -> None:
    save_calibration(beside(model), replace(calibration, layers=()))
    assert command("generate", "--model", model, *GENERATE).code == 0
    assert (policies[0].score, policies[0].layers) == ("key_diff", "calibrated")
    done = command("generate", "--model", model, *GENERATE, "--kv-score", "fitted")
    assert "without --budgets-only" in done.err


def test_inspect_counts_the_tokens_of_heads(
    command: Command, model: Path, calibration: Calibration, tmp_path: Path
) -> None:
    save_calibration(beside(model), calibration)
    positions = tmp_path / "positions.json"
    done = command("inspect", "--model", model, "--prompt", PROMPT, *SMALL, "--json", positions)
    assert done.code == 0, done.err
    assert "score fitted, share=head, layers=calibrated" in done.out
    held = [len(head["positions"]) for layer in json.loads(positions.read_text())["layers"] for head in layer["heads"]]
    assert len(set(held)) > 1
    assert sum(held) == 24 * len(held)


def test_plan_takes_a_file(command: Command, model: Path, calibration: Calibration) -> None:
    save_calibration(beside(model), calibration)
    budget = ("plan", "--model", model, "--kv-budget", 256, "--context", "4096", "--json")
    uniform = command(*budget)
    given = command(*budget, "--kv-calibration", beside(model))
    assert given.code == 0, given.err
    planned = [json.loads(done.out)["strategies"][-1]["bytes_held"][0] for done in (uniform, given)]
    assert planned[1] > planned[0]  # heads with more than the mean
