"""README.md and docs/generate.md work: commands run as they are written, in a fresh checkout with an empty home.

What stands in where a command cannot run here as it is:
  git clone     the copy itself
  make          the command that `make --dry-run` ends with; what would be installed before it is compared with what the
                README's commands need
  pip install   that the extras exist, and that it installs this folder: a package index has no mlx-kv yet
  mlx-kv serve  has the bundled model, listens on a free port instead of 8080, is asked once, and ended
"""

from __future__ import annotations

import html
import json
import re
import sys
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import recipes
from pages import ADDRESS, ROOT, Shell, commands, empty_environment, fresh_checkout, without_times

README = (ROOT / "README.md").read_text(encoding="utf-8")
GENERATE = (ROOT / "docs" / "generate.md").read_text(encoding="utf-8")
SHOWN = f"{README}\n{GENERATE}"  # one example of each command, in one of the two
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
NEEDS = {"--plot": "plot", "mlx-kv serve": "server"}


def starting(*words: str) -> list[str]:
    return [line for line in commands(SHOWN) if line.startswith(words)]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fresh_checkout(tmp_path_factory.mktemp("fresh"))


@pytest.fixture(scope="module")
def shell(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(checkout, empty_environment(tmp_path_factory.mktemp("home")), recipes.stand_ins())


def dry_run(line: str, shell: Shell) -> list[str]:
    """The lines that make would run, in a folder where nothing is set up."""
    return shell.run(f"{line.partition('#')[0]} --dry-run").stdout.splitlines()


def test_every_command_is_found() -> None:
    assert len(starting("mlx-kv", "echo")) >= 10
    assert [line.split()[:2] for line in starting("git", "make")] == [
        ["git", "clone"],
        ["make", "generate"],
        ["make", "test"],
    ]
    shown = set(re.findall(r"^    (?:.*\| )?mlx-kv .*$", SHOWN, re.M))
    assert shown == {
        f"    {line}" for line in commands(SHOWN) if "mlx-kv " in line and line.startswith(("mlx-kv", "echo"))
    }


def test_the_readme_fits_a_short_reading() -> None:
    assert len(README.splitlines()) <= 110


@pytest.mark.slow
def test_make_generate_prints_what_is_shown(shell: Shell) -> None:
    (line,) = starting("make generate")
    done = shell.run(dry_run(line, shell)[-1].removeprefix(".venv/bin/"))
    block = re.search(r"((?:    .*\n|\n)+)", GENERATE[GENERATE.index('    garnet"') :])
    assert block is not None
    shown = [each[4:] for each in block[0].rstrip().splitlines()]
    rule = shown.index("-" * 40)
    assert done.stdout.splitlines()[0] == shown[0] == 'garnet"'
    assert without_times(done.stderr) == without_times("\n".join(shown[rule:]))


def test_the_picture_is_of_a_run_that_prints_what_is_shown() -> None:
    """Its words, in their places: tools/run_picture.py drew what a run printed."""
    svg = (ROOT / "docs" / "run.svg").read_text(encoding="utf-8")
    lines = [html.unescape(line).replace("\xa0", " ") for line in re.findall(r"<text [^>]*>(.*?)</text>", svg)]
    said = "\n".join(line.rstrip() for line in lines)
    block = re.search(r"((?:    .*\n|\n)+)", GENERATE[GENERATE.index('    garnet"') :])
    assert block is not None
    shown = [line.strip() for line in without_times(block[0]) if line.strip()]
    assert [line for line in shown if line not in [each.strip() for each in without_times(said)]] == []
    assert not re.search(r"""(?:href|src)=|url\(["']?http""", svg)


def test_the_set_up_installs_what_the_readme_shows(shell: Shell) -> None:
    needed = {extra for words, extra in NEEDS.items() if any(words in line for line in commands(SHOWN))}
    assert needed == {"plot", "server"}
    for line in starting("make"):
        lines = dry_run(line, shell)
        (install,) = [each for each in lines if "pip install" in each]
        (extras,) = re.findall(r'-e "\.\[(.*)\]"', install)
        assert needed <= set(extras.split(",")) <= set(EXTRAS)
        assert re.match(r"(HYPOTHESIS_PROFILE=usual )?\.venv/bin/(mlx-kv generate|python -m pytest)", lines[-1])
    for line in starting("pip"):
        (extras,) = re.findall(r'^pip install "\.\[(.*)\]"(?: +#.*)?$', line)
        assert needed <= set(extras.split(",")) <= set(EXTRAS)


@pytest.mark.slow
def test_commands_run_as_they_are_written(checkout: Path, shell: Shell) -> None:
    lines = [line for line in starting("mlx-kv", "echo") if not line.startswith("mlx-kv serve")]
    chains: dict[str, list[str]] = {}  # a command waits for the one that writes its file
    for line in lines:
        written = re.findall(r"[\w.]+\.safetensors", line)
        chains.setdefault(written[0] if written else line, []).append(line)

    def follow(chain: list[str]) -> None:
        for line in chain:
            done = shell.run(line)
            assert "this model was made for" not in done.stderr, line
            for file in re.findall(r"--(?:plot|output) (\S+)", line):
                assert (checkout / file).stat().st_size > 0, line

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(follow, chains.values()))
    answers = [json.loads(line) for line in (checkout / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == len((ROOT / "examples" / "prompts.jsonl").read_text().splitlines())


@pytest.mark.slow
def test_the_server_answers_as_it_is_started(shell: Shell) -> None:
    (line,) = starting("mlx-kv serve")
    with shell:
        shell.run(line)
        body = json.dumps({"prompt": "import os", "max_tokens": 3}).encode()
        url = f"{shell.instead[ADDRESS]}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
        shell.end_servers()


@pytest.mark.slow
def test_the_programs_run(checkout: Path, shell: Shell) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.S)
    others = re.findall(r"```python\n(.*?)```", GENERATE, re.S)
    assert len(others) == 2
    said = []
    for text in (program, *others):
        (checkout / "program.py").write_text(text)
        done = shell.run(f"PYTHONWARNINGS=error::RuntimeWarning {sys.executable} program.py")
        assert done.stderr == ""
        said.append(done.stdout)
    assert all(said[at].startswith('garnet"\nassert settings[') for at in (0, 2))


def test_files_that_docs_and_commands_name_are_there() -> None:
    texts = [README, (ROOT / "Makefile").read_text(), *(file.read_text() for file in (ROOT / "docs").glob("*.md"))]
    named = set(re.findall(r"(?<![\w/.])(?:examples|mlx_kv|benchmarks|tools)/[\w./-]+\w", "\n".join(texts)))
    assert len(named) > 5
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
