"""`mlx-kv batch`: answers are those of each prompt alone, bad lines are named, and bad options are one line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from batch_runs import GOOD, PROMPTS, Files, alone

from mlx_kv.cli import main as cli
from mlx_kv.generation.engine import Engine

# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--max-batch-size", 2),
        ("--draft-model", "reference", "--max-batch-size", 3),
        ("--draft", "suffix", "--max-batch-size", 3),
        ("--draft", "ngram", "--prompt-lookup-max", 3, "--num-draft-tokens", 5),
    ],
)
@pytest.mark.slow
def test_every_prompt_gets_what_it_gets_alone(more: tuple[Any, ...], call: Any, files: Files, reference: Any) -> None:
    files.ask(*PROMPTS)
    done = call("--max-tokens", 20, *more)
    assert done.code == 0, done.err
    found = files.by_id()
    for number, entry in enumerate(PROMPTS, 1):
        answer = found.pop(entry.get("id", number))
        assert (answer.pop("id"), answer.pop("line")) == (entry.get("id", number), number)
        assert len(answer.pop("digest")) == 16
        assert answer == alone(reference, entry["prompt"], entry.get("max_tokens", 20))
    assert found == {}
    assert "lines       6 done, 0 skipped, 0 bad" in done.err
    assert "tokens/s" in done.err
    assert ("accepted in" in done.err) == any("--draft" in str(option) for option in more)
    assert "%|" not in done.err  # no progress bar where nobody looks


def test_an_answer_that_ends_by_itself_says_so(call: Any, files: Files, reference: Any) -> None:
    reference[1].eos_token_ids.add(199)  # a line feed
    try:
        files.ask({"prompt": "import os\nimport sys", "max_tokens": 40})
        assert call().code == 0
        (answer,) = files.answers()
        wanted = alone(reference, "import os\nimport sys", 40)
    finally:
        reference[1].eos_token_ids.remove(199)
    assert answer["finish_reason"] == "stop"
    assert wanted.items() <= answer.items()


def test_settings_of_the_policy_and_the_sampler_arrive(call: Any, files: Files) -> None:
    files.ask({"prompt": "def f(x):\n", "max_tokens": 30})
    texts = []
    for options in (
        ("--temp", 1, "--seed", 1),
        ("--temp", 1, "--seed", 1),
        ("--temp", 1, "--seed", 2),
        ("--kv-bits", 2),
    ):
        files.output.unlink(missing_ok=True)
        assert call(*options).code == 0
        texts.append(files.answers()[0]["text"])
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    files.output.unlink()
    assert "--kv-bits 7: a quantised cache has 2, 3, 4, 5, 6, 8 bits" in call("--kv-bits", 7).err


def test_no_more_than_a_few_batches_are_submitted_ahead(
    call: Any, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, submit = 0, Engine.submit

    def counting(self: Engine, sequence: Any) -> None:
        nonlocal most
        submit(self, sequence)
        most = max(most, len(self.pending) + len(self.rows))

    monkeypatch.setattr(Engine, "submit", counting)
    files.ask(*({"prompt": [5], "max_tokens": 2} for _ in range(40)))
    assert call("--max-batch-size", 2).code == 0
    assert len(files.by_id()) == 40
    assert most == 6


# --- bad lines --------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, str]] = {
    "half a line": ('{"prompt": "x"', "not JSON (Expecting ',' delimiter, column 15): give one JSON object"),
    "no JSON": ("hello", "not JSON (Expecting value, column 1)"),
    "no object": ("[1, 2]", "Expected `object`, got `array`: give {"),
    "nested": ("[" * 200_000, "nested too deeply"),
    "key": ({"prompt": "x", "temperature": 1}, 'unknown field `temperature`: give {"prompt": a text or token ids'),
    "key twice": ('{"prompt": "x", "prompt": "y"}', 'key "prompt" appears twice'),
    "no prompt": ({"id": 7}, "missing required field `prompt`: give {"),
    "null": ({"prompt": None}, "got `null` - at `$.prompt`: give {"),
    "number": ({"prompt": 7}, "got `int` - at `$.prompt`"),
    "no text": ('{"prompt": "\\ud800"}', "not text (surrogates not allowed): leave out lone surrogates"),
    "empty": ({"prompt": ""}, "the prompt is empty"),
    "blank": ({"prompt": " \n"}, "the prompt is empty"),
    "no tokens": ({"prompt": []}, "the prompt is empty"),
    "fraction": ({"prompt": [1, 2.0]}, "got `float` - at `$.prompt[1]`"),
    "truth": ({"prompt": [True]}, "got `bool` - at `$.prompt[0]`"),
    "negative": ({"prompt": [-1]}, "Expected `int` >= 0 - at `$.prompt[0]`"),
    "vocabulary": ({"prompt": [1, 4096]}, "the prompt has the token 4096, but the vocabulary has 4,096"),
    "too long": ({"prompt": [1] * 4096}, "the prompt has 4,096 tokens, but this model was made for 4,096: shorten it"),
    "limit of 0": ({"prompt": "x", "max_tokens": 0}, "Expected `int` >= 1 - at `$.max_tokens`"),
    "limit in words": ({"prompt": "x", "max_tokens": "9"}, "got `str` - at `$.max_tokens`"),
    "limit of null": ({"prompt": "x", "max_tokens": None}, "got `null` - at `$.max_tokens`"),
    "limit without end": ({"prompt": "x", "max_tokens": 2**40}, "Expected `int` <= 2147483647 - at `$.max_tokens`"),
    "list for an id": ({"prompt": "x", "id": [1]}, "got `array` - at `$.id`"),
    "truth for an id": ({"prompt": "x", "id": True}, "got `bool` - at `$.id`"),
    "id again": ({"prompt": "x", "id": "first"}, 'id "first" is that of line 1: give each line its own'),
    "number again": ({"prompt": "x", "id": 2}, "id 2 is that of line 2"),
}


def test_bad_lines_are_named_and_the_rest_is_done(call: Any, files: Files) -> None:
    lines: list[Any] = [{**GOOD, "id": "first"}, GOOD, ""]
    for bad, _ in BAD.values():
        lines += [bad, GOOD]
    files.ask(*lines)
    done = call()
    assert done.code == 1
    said = {each.split(":")[1]: each for each in done.err.splitlines() if each.startswith("mlx-kv: line ")}
    for i, (_, message) in enumerate(BAD.values()):
        assert message in said.pop(f" line {4 + 2 * i}")
    assert said == {}
    good = {"first", 2, *(5 + 2 * i for i in range(len(BAD)))}
    assert files.by_id().keys() == good
    assert f"lines       {len(good)} done, 0 skipped, {len(BAD)} bad" in done.err
    before = files.output.read_bytes()
    again = call()
    assert (again.code, files.output.read_bytes()) == (1, before)
    assert f"lines       0 done, {len(good)} skipped, {len(BAD)} bad" in again.err


def test_bytes_that_are_no_text_and_a_mark_at_the_beginning(call: Any, files: Files) -> None:
    good = json.dumps(GOOD).encode()
    files.prompts.write_bytes(b"\xef\xbb\xbf" + good + b'\r\n{"prompt": "\xff"}\r\n' + good)
    done = call()
    assert (done.code, files.by_id().keys()) == (1, {1, 3})
    assert "mlx-kv: line 2: not UTF-8 (invalid start byte)" in done.err


@pytest.mark.slow
def test_a_prompt_that_may_go_past_the_context_is_noted(call: Any, files: Files) -> None:
    files.ask(GOOD, {"prompt": [7] * 4000, "max_tokens": 200})
    done = call("--kv-budget", 128, "--max-write", 128, "--max-tokens", 1)
    assert done.code == 0, done.err
    assert "note: 1 line (first 2) may go past the 4,096 tokens that this model was made for" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--draft-model", "reference", "--num-draft-tokens", 5), ("--draft", "suffix")])
def test_with_a_seed_a_line_gets_its_answer_in_any_company(call: Any, files: Files, more: tuple[Any, ...]) -> None:
    """Whatever else is asked, in which order, how many at once, and whether the run was interrupted."""
    lines = [{"prompt": "def f(x):\n", "max_tokens": 12 + 3 * i, "id": f"line {i}"} for i in range(6)]
    sampling = ("--temp", 1, "--top-p", 0.95, "--seed", 4)
    files.ask(*lines)
    assert call(*sampling).code == 0
    wanted = {name: answer["tokens"] for name, answer in files.by_id().items()}
    assert len({tuple(tokens[:12]) for tokens in wanted.values()}) > 4, "lines that are alike draw for themselves"
    kept = files.output.read_text().splitlines(keepends=True)
    for some, left, size in ((lines, kept[:3], 2), (lines[::-1], [], 8), (lines[3:4], [], 1)):
        files.output.write_text("".join(left))
        files.ask(*some)
        assert call(*sampling, *more, "--max-batch-size", size).code == 0
        for name, answer in files.by_id().items():
            assert answer["tokens"] == wanted[name]


# --- the command ------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "drafts without a model": (
        ("--num-draft-tokens", "2"),
        "needs --draft, --draft-head or --draft-model",
    ),
    "nobody": (("--draft", "nobody"), "there is no drafter 'nobody': choose one of auto, model, mtp, ngram, suffix"),
    "no drafts": (("--draft-model", "reference", "--num-draft-tokens", "0"), "--num-draft-tokens 0: "),
    "batch of 0": (("--max-batch-size", "0"), "0 is not in the range"),
    "policy": (("--kv-score", "recent"), "--kv-score is for a budget, but --kv-budget is not given"),
    "no such file": (("--prompts", "/nowhere.jsonl"), "does not exist"),
    "no such folder": (("--output", "/nowhere/a.jsonl"), "cannot open /nowhere/a.jsonl: No such file"),
    "no file to add to": (("--output", "/dev/null"), "is not a regular file"),
    "a folder": (("--prompts", "/"), "is a directory"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_options_are_one_line_and_exit_code_2(case: str, call: Any, files: Files) -> None:
    files.ask(GOOD)
    arguments, message = WRONG[case]
    done = call(*arguments)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert done.err.startswith("mlx-kv: error: ")
    assert message in done.err


def test_a_dash_is_standard_input_and_output(
    files: Files, tmp_path: Path, capfdbinary: Any, monkeypatch: pytest.MonkeyPatch, reference: Any
) -> None:
    """Both, and each beside a file; a file of that name is ./-."""
    monkeypatch.setattr("mlx_kv.mlxlm.loading.load", lambda path, **options: reference)
    monkeypatch.chdir(tmp_path)
    files.ask(*PROMPTS[:3], "{")

    def call(*arguments: Any) -> tuple[Any, bytes, str]:
        with files.prompts.open() as prompts, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", prompts)
            patch.setattr(sys, "argv", ["mlx-kv", "batch", "--max-tokens", "5", *map(str, arguments)])
            with pytest.raises(SystemExit) as end:
                cli.main()
        out, err = capfdbinary.readouterr()
        return end.value.code, out, err.decode()

    for more in ((), ("--overwrite",)):  # nothing is found to be there already
        code, out, err = call("--prompts", "-", "--output", "-", *more)
        assert (code, "lines       3 done, 0 skipped, 1 bad" in err, "line 4: not JSON" in err) == (1, True, True), err
        found = {each["id"]: each for each in map(json.loads, out.splitlines())}
        assert found.keys() == {"fib", 2, 99}
    assert os.listdir(tmp_path) == ["prompts.jsonl"]
    assert call("--prompts", "-", "--output", files.output)[0] == 1
    assert files.by_id() == found
    assert call("--prompts", files.prompts, "--output", "-")[1].count(b"\n") == 3
    assert call("--prompts", files.prompts, "--output", "./-")[1] == b""
    assert Path("-").read_bytes().count(b"\n") == 3


def test_prompts_are_not_written_over(call: Any, files: Files) -> None:
    files.ask(GOOD)
    before = files.prompts.read_bytes()
    done = call("--output", files.prompts)
    assert (done.code, files.prompts.read_bytes()) == (2, before)
    assert "is the file of prompts" in done.err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.command.main(["batch", "--help"])
    assert end.value.code == 0
    assert "mlx-kv batch --prompts prompts.jsonl --output answers.jsonl" in capsys.readouterr().out
