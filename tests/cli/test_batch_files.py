"""`mlx-kv batch`: lines of the output are whole and there once, whatever happens; files of others are left alone."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from batch_runs import GOOD, PROMPTS, Files, alone

from mlx_kv.cli.batch import OutputFile, Request

MANY = [{"prompt": f"def function_{i}(a, b):\n    return a * {i}", "max_tokens": 30 + i % 7} for i in range(24)]


def line(number: int, name: Any = None, **entry: Any) -> str:
    """A line of answers, as it could have been written."""
    return json.dumps({"id": number if name is None else name, "line": number, "digest": "0" * 16, **entry}) + "\n"


# --- killed, and started again ----------------------------------------------------------------------------------------


def start(files: Files, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlx_kv.cli", "batch", *files.options(), "--max-batch-size", "2", *more]
    return subprocess.Popen(  # a shell's background jobs ignore SIGINT, and so would this
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        args=command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def wait_for_lines(process: subprocess.Popen[bytes], files: Files, lines: int) -> None:
    end = time.monotonic() + 60
    while not files.output.exists() or files.output.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, "it ended too early to be killed"
        assert time.monotonic() < end
        time.sleep(0.002)


def whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_where_it_was(call: Any, files: Files) -> None:
    asked = MANY * 2  # more than it can do before it is killed
    files.ask(*asked)
    assert call("--max-batch-size", 2).code == 0
    wanted = files.by_id()
    files.output.unlink()
    kept = b""
    for _ in range(3):
        process = start(files)
        wait_for_lines(process, files, kept.count(b"\n") + 4)
        process.send_signal(signal.SIGSTOP)  # it has the output, and answers no more meanwhile
        refused = call("--max-batch-size", 2)
        process.kill()
        assert process.communicate()[1] == b""
        assert process.returncode == -signal.SIGKILL
        assert (refused.code, "another run writes" in refused.err) == (2, True), refused.err
        content = files.output.read_bytes()
        assert content.startswith(kept)
        kept = whole_lines(content)
        with files.output.open("ab") as file:  # as if it had been killed within a line
            file.write(kept.splitlines()[0][: random.Random(len(kept)).randrange(1, 60)] if content == kept else b"")
    left = len(asked) - kept.count(b"\n")
    assert 0 < left <= len(asked) - 12
    done = call("--max-batch-size", 2)
    assert done.code == 0
    assert f"lines       {left} done, {len(asked) - left} skipped, 0 bad" in done.err
    assert files.output.read_bytes().startswith(kept)
    assert files.by_id() == wanted


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished(call: Any, files: Files) -> None:
    asked = MANY * 3  # far more than it can do before the signal comes
    files.ask(*asked)
    process = start(files)
    wait_for_lines(process, files, 3)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 130
    assert error.endswith("mlx-kv: interrupted\n")
    assert "Traceback" not in error
    held = files.answers()
    said = int(error.split("lines ")[1].split()[0])
    assert said in (len(held), len(held) - 1)  # it may have come between a line and its count
    assert call("--max-batch-size", 16).code == 0
    assert files.answers()[: len(held)] == held
    assert files.by_id().keys() == set(range(1, len(asked) + 1))


def test_any_half_of_the_last_line_is_cut_off(files: Files) -> None:
    first, second = line(1, text="a"), line(2, "zwei", text="b")
    for length in range(len(second) + 1):
        files.output.write_text(first + second[:length])
        with OutputFile(str(files.output)) as answers:
            whole = length == len(second)
            assert answers.done.keys() == ({1, "zwei"} if whole else {1})
            answers.append(Request(3, 3, "x", 1, "d"), {"text": "c"})
        lines = files.output.read_text().splitlines(keepends=True)
        assert lines[:-1] == ([first, second] if whole else [first])
        assert json.loads(lines[-1]) == {"id": 3, "line": 3, "digest": "d", "text": "c"}


def test_a_line_that_does_not_fit_on_the_disk(call: Any, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.ask(*PROMPTS)
    append, count = OutputFile.append, iter(range(9))

    def full(self: OutputFile, request: Request, answer: dict[str, Any]) -> None:
        with monkeypatch.context() as patch:
            if next(count) == 2:
                file = self._file
                half = SimpleNamespace(write=lambda line: file.write(line[:20]), fileno=file.fileno)
                patch.setattr(self, "_file", half)
            append(self, request, answer)

    with monkeypatch.context() as patch:
        patch.setattr(OutputFile, "append", full)
        done = call("--max-tokens", 20)
    assert done.code == 2
    assert f"cannot write {files.output}: {os.strerror(errno.ENOSPC)}" in done.err
    before = files.output.read_bytes()
    assert call("--max-tokens", 20).code == 0
    assert files.output.read_bytes().startswith(whole_lines(before))
    assert len(files.by_id()) == len(PROMPTS)


def test_nothing_to_do_is_said(call: Any, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.ask(GOOD, {**GOOD, "id": "b"})
    assert call().code == 0
    before = files.output.read_bytes()
    monkeypatch.setattr("mlx_kv.mlxlm.loading.load", None)  # no model is loaded for it
    done = call()
    assert (done.code, files.output.read_bytes()) == (0, before)
    assert done.err == f"mlx-kv: nothing to do: 2 of 2 lines are in {files.output}\n"
    files.ask("{", {**GOOD, "id": "b"})
    assert call().code == 1
    files.ask()
    assert call().code == 0


# --- files of others, and other prompts -------------------------------------------------------------------------------

FOREIGN = {
    "text": "dear diary\n",
    "half a text": "dear diary",
    "JSON": '{"prompt": "x"}\n',
    "prompts": '{"id": 1, "prompt": "x"}\n',
    "prompts without an end": '{"id": 1, "prompt": "x"}',
    "no digest": '{"id": 1, "line": 1, "text": "x"}\n',
    "after ours": line(1) + "dear diary\n",
    "a blank line": line(1) + "\n" + line(2),
    "a half line within": line(1)[:20] + "\n" + line(2),
    "zeros": line(1) + "\0\0\0\0",
    "an id twice": line(1) + line(2, 1),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_file_of_others_is_refused_and_untouched(case: str, call: Any, files: Files) -> None:
    files.ask(GOOD)
    files.output.write_text(FOREIGN[case])
    for more in ((), ("--overwrite",)):
        done = call(*more)
        assert done.code == 2
        assert done.err.startswith("mlx-kv: error: line ")
        assert done.err.endswith(" of this command: give another file\n")
        assert files.output.read_text() == FOREIGN[case]


def test_another_prompt_with_the_same_id_is_refused_until_told(call: Any, files: Files, reference: Any) -> None:
    files.ask({**GOOD, "id": "a"}, {**GOOD, "id": "b"}, {"prompt": "x", "id": "c"})
    assert call("--max-tokens", 4).code == 0
    before, old = files.output.read_bytes(), files.by_id()
    files.ask({**GOOD, "id": "a"}, {"prompt": "class A", "id": "b", "max_tokens": 3}, {"prompt": "x", "id": "c"})
    done = call("--max-tokens", 5)
    assert (done.code, files.output.read_bytes()) == (2, before)
    assert done.err.startswith('mlx-kv: error: line 2 (and 1 more): id "b" is in ')
    assert "--overwrite to do it again" in done.err
    done = call("--max-tokens", 5, "--overwrite")
    assert (done.code, "2 done, 1 skipped" in done.err) == (0, True)
    found = files.by_id()
    assert found["a"] == old["a"]
    assert alone(reference, "class A", 3).items() <= found["b"].items()
    assert alone(reference, "x", 5).items() <= found["c"].items()
    assert sorted(path.name for path in files.output.parent.iterdir()) == ["answers.jsonl", "prompts.jsonl"]


@pytest.mark.parametrize(
    ("more", "same"),
    [
        (("--max-batch-size", 1, "--prefill-step-size", 64, "--draft-model", "reference"), True),
        (("--kv-growth", "step", "--seed", 3), True),
        (("--draft", "ngram"), True),
        (("--kv-bits", 8), False),
        (("--temp", 0.5), False),
        (("--ignore-chat-template",), False),
        (("--model", "draft"), False),
    ],
)
def test_only_settings_that_change_answers_count(more: tuple[Any, ...], same: bool, call: Any, files: Files) -> None:
    files.ask(GOOD)
    assert call().code == 0
    assert call(*more).code == (0 if same else 2)


def test_a_replaced_file_stays_locked(files: Files) -> None:
    files.output.write_text(line(1) + line(2))
    old = os.open(files.output, os.O_RDWR)
    with OutputFile(str(files.output)) as answers:
        answers.drop({1})
        assert files.output.read_text() == line(2)
        with pytest.raises(ValueError, match="another run writes"):
            OutputFile(str(files.output))
        answers.append(Request(3, 3, "x", 1, "d"), {})
        with pytest.raises(BlockingIOError):  # another run may have opened it before it was replaced
            fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(old)
    with OutputFile(str(files.output)) as answers:
        assert answers.done == {2: "0" * 16, 3: "d"}
