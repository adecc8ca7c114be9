"""The examples in docs/settings.md work: their blocks run as they stand and print what is shown.

What stands in for what is not here says `recipes.py`.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import recipes
from pages import ADDRESS, Block, Shell, blocks, empty_environment, fresh_checkout

PAGE = [
    block for block in blocks(recipes.PAGE.read_text(encoding="utf-8")) if block.heading.startswith(recipes.EXAMPLE)
]
Follow = Callable[[str], list[str]]

pytestmark = pytest.mark.slow


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    home = tmp_path / "home"
    home.mkdir()
    shell = Shell(fresh_checkout(tmp_path), empty_environment(home), recipes.stand_ins(), recipes.VARIES)
    with shell as found:
        yield found
        found.end_servers()


@pytest.fixture
def follow(shell: Shell) -> Follow:
    """Runs an example, and returns what each of its blocks that run has printed."""

    def run(name: str) -> list[str]:
        found = [block for block in PAGE if block.heading == f"{recipes.EXAMPLE}{name}"]
        assert found
        return [said for block in found for said in [shell.run_block(block)] if block.kind != "shown"]

    return run


def number(pattern: str, text: str) -> float:
    (found,) = re.findall(pattern, text, re.M)
    return float(found.replace(",", ""))


def test_every_case_has_an_example() -> None:
    cases = recipes.PAGE.read_text(encoding="utf-8").split("\n## ")[3:]  # behind those of size and of budget
    assert len(cases) == 6
    for case in cases:
        assert [case.count(part) for part in ("\nWatch out:\n", f"\n### {recipes.EXAMPLE}")] == [1, 1]
    for heading in {block.heading for block in PAGE}:
        assert {"commands", "shown"} <= {block.kind for block in PAGE if block.heading == heading}


def test_what_is_shown_must_have_been_printed(shell: Shell) -> None:
    shell.run("echo one 1; echo two; echo at 7.5 tokens/s")
    with pytest.raises(AssertionError, match="not there: one 2"):
        shell.run_block(Block("", "shown", "one 2\n"))
    with pytest.raises(AssertionError, match="not there: one 1"):
        shell.run_block(Block("", "shown", "two\none 1\n"))
    shell.run_block(Block("", "shown", "one 1\n\nat 9 tokens/s\n"))


def test_a_long_chat(follow: Follow, shell: Shell) -> None:
    talked, went_on = follow("a chat under a small budget")
    held, evicted = (number(rf"^{word} +([\d,]+)", talked) for word in ("held", "evicted"))
    assert 256 <= held - evicted <= 256 + 128  # a margin
    assert number(r"^held +([\d,]+)", went_on) == held
    *_, turn = re.findall(r"; (\d+) read, ([\d,]+) known", went_on)
    assert int(turn[0]) < 20
    otherwise = shell.run('(echo "/load talk.safetensors"; echo "import os") | mlx-kv chat --max-tokens 4').stderr
    assert number(r"; ([\d,]+) read, 0 known", otherwise) > held
    undone = shell.run('(echo "/load talk.safetensors"; echo /undo; echo 1) | mlx-kv chat --kv-bits 8 --max-tokens 4')
    assert " 0 known" in undone.stderr


def test_fifty_users(follow: Follow) -> None:
    _server, said = follow("fifty users, one system prompt")
    first, alone = number(r"user: (\d+)", said), number(r"read, ([\d.]+) MB kept", said)
    read, asked = number(r"others: (\d+)", said), number(r"of (\d+) tokens", said)
    assert asked > 49 * (first - 10)
    assert read < asked / 50
    assert number(r"([\d.]+) MB more", said) < 49 * alone / 10


def test_an_agent(follow: Follow, shell: Shell) -> None:
    follow("a file with a change")  # how much is drafted there follows the clock, so that is not asserted
    assert (shell.folder / "drafted.txt").read_bytes() == (shell.folder / "plain.txt").read_bytes() != b""
    (command,) = {line for block in PAGE for line in block.commands if "> drafted.txt" in line}
    fixed = shell.run(command.replace("--draft suffix", "--draft suffix --draft-length fixed"))
    assert number(r"([\d.]+) tokens a pass", fixed.stderr) > 1.5
    assert (shell.folder / "drafted.txt").read_bytes() == (shell.folder / "plain.txt").read_bytes()
    body = json.dumps({"prompt": (shell.folder / "stock_tests.py").read_text(), "max_tokens": 80}).encode()
    url = shell.instead[ADDRESS]
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=60).close()
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        metrics = answer.read().decode()
    for name in ("mlx_kv_draft_tokens_accepted_total", "mlx_kv_draft_gain"):
        assert re.search(rf"^{name} [\d.]+", metrics, re.M), name


def test_a_batch_over_a_folder(follow: Follow, shell: Shell) -> None:
    follow("a folder of files")
    files = {path.name for path in (shell.folder / "docs").glob("c*.md")}
    assert {path.name for path in (shell.folder / "continued").iterdir()} == files
    answers = shell.folder / "folder-answers.jsonl"
    whole = sorted(answers.read_text().splitlines())
    answers.write_text("\n".join(answers.read_text().splitlines()[:3]) + '\n{"id": "mlx')  # killed in the fourth
    (command,) = {line for block in PAGE if "folder" in block.heading for line in block.commands if "--output" in line}
    assert f"{len(whole) - 3} done, 3 skipped" in shell.run(command).stderr
    assert sorted(answers.read_text().splitlines()) == whole
    prompts = shell.folder / "folder.jsonl"
    prompts.write_text(prompts.read_text().replace('"max_tokens": 16', '"max_tokens": 15'))
    with pytest.raises(AssertionError, match="--overwrite"):
        shell.run(command)


def test_a_cache_for_each_document(follow: Follow, shell: Shell) -> None:
    (said,) = [said for said in follow("two processes, one document") if said]
    assert len(list((shell.folder / "documents").glob("*.block"))) >= 3
    program = (shell.folder / "ask.py").read_text().replace('"documents"', '"nothing"')
    (shell.folder / "alone.py").write_text(program)
    first, _, text = shell.run('python alone.py examples/unfinished.py "ivory"').stdout.partition("\n")
    assert first.startswith("0 of 1948")
    assert text.strip()
    assert said.strip().endswith(f"s\n{text.strip()}")


def test_two_machines(follow: Follow, shell: Shell) -> None:
    _plan, together, apart = follow("two ranks")
    text = shell.run('mlx-kv generate --prompt "import os" --max-tokens 20').stdout.strip()
    assert text
    assert together.strip().startswith(text)
    assert apart.strip().startswith(text)
    assert "2 ranks" in apart
