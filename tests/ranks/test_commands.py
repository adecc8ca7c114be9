"""The commands on several ranks: the first does what it does alone, and the others say nothing."""

from __future__ import annotations

import io
import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import httpx
import programs
import pytest
from launching import MLX_KV, Finished, Ranks, run_ranks, started_ranks, succeeded

from mlx_kv.cli.options import LeadersFile
from mlx_kv.ranks.group import SAMPLE_BYTES, files_fingerprint
from mlx_kv.ranks.link import EXIT_CODE

PROMPT = "def fibonacci(n):\n    "
SOURCE = (Path(__file__).parent.parent / "source.txt").read_text()[:1500]


# --- generate and batch -------------------------------------------------------------------------------------------


def test_generate_says_what_it_says_alone(command: Callable[..., Any]) -> None:
    options = ("generate", "--prompt", PROMPT, "--max-tokens", 40, "--kv-budget", 24, "--kv-keep-recent", 8, "--json")
    alone = json.loads(command(*options, "--kv-margin", 4).out)
    leader, other = succeeded(run_ranks(2, MLX_KV, *options, "--kv-margin", 4, "--split", "heads"))
    answer = json.loads(leader.stdout)
    assert (other.stdout, other.stderr, answer.pop("ranks")) == ("", "", 2)
    assert set(answer) == set(alone)
    for name, value in alone.items():
        if name == "kv_bytes_allocated":  # of all ranks, each of which has the scores of its tokens
            assert value <= answer[name] <= value + 1024
        elif "second" not in name and name != "peak_memory_bytes":
            assert answer[name] == value, name


@pytest.mark.slow
def test_chat_answers_what_it_answers_alone(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ("chat", "--max-tokens", 8, "--repetition-penalty", 1.3, "--draft", "suffix")
    lines = f"import os\nprint(\n/undo\nclass A:\n/save {tmp_path}/kept\n/stats\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    alone = command(*options)
    leader, other = succeeded(run_ranks(2, MLX_KV, *options, "--split", "heads", stdin=lines))
    assert (leader.stdout, other.stdout, other.stderr) == (alone.out, "", "")
    assert "mlx-kv: each of several ranks has a part of the conversation: it cannot be kept in a file" in leader.ours
    assert "mlx-kv: removed the last turn: 1 turn left" in leader.ours
    known = next(line for line in leader.ours if line.startswith("known"))
    assert int(known.split()[1]) > 8, known  # the first turn is not read again


@pytest.mark.slow
def test_batch_writes_what_it_writes_alone(tmp_path: Path, command: Callable[..., Any]) -> None:
    prompts, alone, together = (tmp_path / name for name in ("prompts.jsonl", "alone.jsonl", "together.jsonl"))
    lines = [{"prompt": PROMPT}, {"prompt": "import os\n", "max_tokens": 3}, {"prompt": [400, 401], "id": 9}, {"no": 1}]
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    options = ("batch", "--prompts", prompts, "--max-tokens", 12, "--kv-bits", 8, "--max-batch-size", 2)
    assert command(*options, "--output", alone).code == 1
    leader, other = run_ranks(2, MLX_KV, *options, "--output", together, "--draft", "suffix")
    assert (leader.code, other) == (1, Finished(0, "", ""))
    assert sorted(together.read_text().splitlines()) == sorted(alone.read_text().splitlines())
    assert "3 done, 0 skipped, 1 bad" in leader.stderr
    leader, other = run_ranks(2, MLX_KV, *options, "--output", together)
    assert (leader.code, other) == (1, Finished(0, "", ""))
    assert "nothing to do: 3 of 4 lines" in leader.stderr


# --- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "of_the_second", "line"),
    [
        (["--split", "layers"], [], "mlx-lm cannot split the layers of llama: use --split heads"),
        ([], ["--kv-bits", "8"], "rank 1 has another --kv-bits than rank 0 (8, not none): start all ranks alike"),
        ([], ["--model", "draft"], "rank 1 has another model than rank 0 ("),
    ],
)
@pytest.mark.slow
def test_ranks_that_cannot_run_together_say_the_same_line(
    options: list[str], of_the_second: list[str], line: str
) -> None:
    program = (*MLX_KV, "generate", "--prompt", PROMPT, *options)
    with started_ranks(2, program, each=lambda rank: of_the_second if rank else []) as ranks:
        finished = ranks.wait()
    for each in finished:
        assert (each.code, each.stdout) == (2, "")
        assert each.stderr.startswith(f"mlx-kv: error: {line}")
        assert each.stderr == finished[0].stderr
        assert each.stderr.count("\n") == 1


@pytest.mark.slow
def test_what_the_leader_refuses_ends_the_others(tmp_path: Path) -> None:
    leader, other = run_ranks(2, MLX_KV, "generate", "--prompt", " ")
    assert leader.ours == ["mlx-kv: error: the prompt is empty: give at least one word"]
    assert other.ours == ["mlx-kv: error: the leader has ended: the prompt is empty: give at least one word"]
    assert (leader.code, other.code) == (2, 2)


@pytest.mark.slow
def test_an_interrupt_is_the_leaders() -> None:
    with started_ranks(2, MLX_KV, "generate", "--prompt", PROMPT, "--max-tokens", 4000) as ranks:
        while not ranks.stdout(0):
            time.sleep(0.02)
        for rank in (1, 0):  # a terminal's Ctrl-C goes to all
            ranks.kill(rank, signal.SIGINT)
        leader, other = ranks.wait(20)
    assert (leader.code, leader.ours[-1]) == (130, "mlx-kv: interrupted")  # after the line that was being written
    assert (other.code, other.ours) == (130, ["mlx-kv: error: the leader has ended: interrupted"])


@pytest.mark.parametrize("option", ["--split=heads", "--layers=2,1", "--link-address=10.0.0.1"])
def test_options_of_ranks_need_ranks(option: str, command: Callable[..., Any]) -> None:
    called = command("generate", "--prompt", PROMPT, option)
    assert called.code == 2
    assert "is for several ranks: start them with mlx.launch" in called.err


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_secret_that_is_none_is_refused(name: str, tmp_path: Path, command: Callable[..., Any]) -> None:
    (tmp_path / "empty").write_text(" \n")
    called = command("generate", "--prompt", PROMPT, "--secret-file", tmp_path / name)
    assert called.code == 2


def test_files_of_the_leader_need_not_be_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kind = LeadersFile(exists=True, path_type=Path)
    with pytest.raises(click.BadParameter):
        kind.convert("/nowhere", None, None)
    (tmp_path / "hosts").write_text('[["127.0.0.1:1"], ["127.0.0.1:2"]]')
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts"))
    monkeypatch.setenv("MLX_RANK", "1")
    assert kind.convert("/nowhere", None, None) == Path("/nowhere")
    monkeypatch.setenv("MLX_RANK", "0")
    with pytest.raises(click.BadParameter):
        kind.convert("/nowhere", None, None)


def test_models_are_told_apart_by_their_files(tmp_path: Path) -> None:
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(bytes(5 * SAMPLE_BYTES))
    config.write_text("{}")
    (tmp_path / "README.md").write_text("not read")
    seen = {files_fingerprint(tmp_path.iterdir())}
    for place in (0, 5 * SAMPLE_BYTES // 2 + 1, 5 * SAMPLE_BYTES - 1):
        content = bytearray(5 * SAMPLE_BYTES)
        content[place] = 1
        weights.write_bytes(content)
        seen.add(files_fingerprint(tmp_path.iterdir()))
    config.write_text("{ }")
    seen.add(files_fingerprint(tmp_path.iterdir()))
    assert len(seen) == 5
    (tmp_path / "README.md").write_text("still not read")
    assert files_fingerprint(tmp_path.iterdir()) in seen


# --- serve --------------------------------------------------------------------------------------------------------


def address(ranks: Ranks) -> str:
    return ranks.wait_for(" at http://").split(" at ")[1].split("/v1")[0]


def streamed(url: str, ready: Callable[[], object]) -> str:
    body = {"prompt": PROMPT, "max_tokens": 4000, "stream": True}
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        for piece in answer.iter_text():
            text += piece
            ready()
    return text


@pytest.mark.parametrize("how", ["killed", "told to end"])
@pytest.mark.slow
def test_serve_answers_everybody_before_it_ends(how: str) -> None:
    with started_ranks(2, MLX_KV, "serve", "--port", 0, "--drain-seconds", 1) as ranks, ThreadPoolExecutor(4) as pool:
        url = address(ranks)
        for known in (False, True):  # the second request finds what the ranks have kept of the first
            body = {"prompt": SOURCE, "max_tokens": 5}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
            assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 200) == known
        began: list[int] = []
        stream = pool.submit(streamed, url, lambda: began.append(1))
        while not began:
            time.sleep(0.01)
        whole = pool.submit(
            httpx.post, f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 4000}, timeout=60
        )
        time.sleep(0.5)
        figures = httpx.get(f"{url}/memory", timeout=60).json()
        assert figures["bytes_live"] > 0
        if how == "killed":
            ranks.kill(1)
            gone = time.monotonic()
        else:
            ranks.kill(1, signal.SIGTERM)  # only the first one's counts
            ranks.kill(1, signal.SIGINT)
            ranks.kill(0, signal.SIGTERM)
        answer, text = whole.result(30), stream.result(30)
        leader, other = ranks.wait(20)
        if how == "killed":
            assert time.monotonic() - gone < 2.5
    assert answer.status_code == 503
    why = "the server ends: rank 1 is gone" if how == "killed" else "the server is shutting down"
    assert why in answer.json()["error"]["message"]
    assert why in text
    assert text.endswith("data: [DONE]\n\n")
    assert (leader.stdout, other.stdout) == ("", "")
    if how == "killed":
        assert (leader.code, other.code) == (EXIT_CODE, -signal.SIGKILL)
        assert leader.ours[2:] == ["mlx-kv: error: the server has ended: rank 1 is gone: start all ranks again"]
    else:
        assert (leader.code, other.code, other.stderr) == (0, 0, "")


@pytest.mark.slow
def test_a_signal_to_the_leader_while_models_load_is_no_fault() -> None:
    with started_ranks(2, programs.loads) as ranks:
        for rank in (0, 1):
            ranks.wait_for("loading", rank)
        ranks.kill(0, signal.SIGTERM)
        leader, other = ranks.wait(20)
    assert (leader.code, leader.ours[-1]) == (0, "mlx-kv: stopped")
    assert (other.code, other.ours[-1]) == (0, "mlx-kv: the leader has ended: stopped")
