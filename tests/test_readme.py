"""What README.md shows works: its commands run as they are written, in a fresh copy of the checkout with an empty home.

What stands in where a command cannot run here as it is:
  git clone     the copy itself
  make          the command that `make --dry-run` ends with; what would be installed before it is compared with what the
                README's commands need
  pip install   that the extras exist, and that it installs this folder: a package index has no mlx-kv yet
  mlx-kv serve  listens on a free port instead of 8080, is asked once, and ended
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
PROGRAMS = ("git", "make", "pip", "mlx-kv", "echo")
NEEDS = {"--plot": "plot", "mlx-kv serve": "server"}


def commands() -> Iterator[str]:
    """Every line of the blocks of commands; other indented blocks are what a command prints."""
    for block in re.findall(r"(?:\n\n)((?:    .*(?:\n|$))+)", README):
        lines = [line[4:] for line in block.splitlines()]
        if lines[0].startswith(PROGRAMS):
            yield from filter(None, lines)


def starting(*words: str) -> list[str]:
    return [line for line in commands() if line.startswith(words)]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fresh") / "mlx-kv"
    hidden = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")
    return Path(shutil.copytree(ROOT, folder, ignore=hidden))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("home")
    own = ("PYTHON", "HF_", "XDG_", "MAKE", "MFLAGS")  # a make inside of another one says more than it would alone
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


def run(line: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{line}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def dry_run(line: str, folder: Path, environment: dict[str, str]) -> list[str]:
    """The lines that make would run, in a folder where nothing is set up."""
    return run(f"{line.partition('#')[0]} --dry-run", folder, environment).stdout.splitlines()


def test_every_command_is_found() -> None:
    assert len(starting("mlx-kv", "echo")) >= 10
    assert [line.split()[:2] for line in starting("git", "make")] == [
        ["git", "clone"],
        ["make", "generate"],
        ["make", "test"],
    ]
    shown = set(re.findall(r"^    (?:.*\| )?mlx-kv .*$", README, re.M))
    assert shown == {f"    {line}" for line in commands() if "mlx-kv " in line and line.startswith(("mlx-kv", "echo"))}


@pytest.mark.slow
def test_make_generate_prints_what_is_shown(checkout: Path, environment: dict[str, str]) -> None:
    (line,) = starting("make generate")
    done = run(dry_run(line, checkout, environment)[-1].removeprefix(".venv/bin/"), checkout, environment)
    block = re.search(r"((?:    .*\n|\n)+)", README[README.index('    garnet"') :])
    assert block is not None
    shown = [each[4:] for each in block[0].rstrip().splitlines()]
    rule = shown.index("-" * 40)
    assert done.stdout.splitlines()[0] == shown[0] == 'garnet"'

    def without_rates(lines: list[str]) -> list[str]:
        # Times, and what else depends on the machine.
        text = re.sub(r"[\d.,]+ (tokens/s|s;)|(?<=peak memory ).*", "", "\n".join(lines))
        return [line.strip() for line in text.splitlines()]

    assert without_rates(done.stderr.splitlines()) == without_rates(shown[rule:])


def test_the_set_up_installs_what_the_readme_shows(checkout: Path, environment: dict[str, str]) -> None:
    needed = {extra for words, extra in NEEDS.items() if any(words in line for line in commands())}
    assert needed == {"plot", "server"}
    for line in starting("make"):
        lines = dry_run(line, checkout, environment)
        (install,) = [each for each in lines if "pip install" in each]
        (extras,) = re.findall(r'-e "\.\[(.*)\]"', install)
        assert needed <= set(extras.split(",")) <= set(EXTRAS)
        assert re.match(r"\.venv/bin/(mlx-kv generate|python -m pytest)", lines[-1])
    for line in starting("pip"):
        (extras,) = re.findall(r'^pip install "\.\[(.*)\]"(?: +#.*)?$', line)
        assert needed <= set(extras.split(",")) <= set(EXTRAS)


@pytest.mark.slow
def test_commands_run_as_they_are_written(checkout: Path, environment: dict[str, str]) -> None:
    lines = [line for line in starting("mlx-kv", "echo") if not line.startswith("mlx-kv serve")]
    chains: dict[str, list[str]] = {}  # a command waits for the one that writes its file
    for line in lines:
        written = re.findall(r"[\w.]+\.safetensors", line)
        chains.setdefault(written[0] if written else line, []).append(line)

    def follow(chain: list[str]) -> None:
        for line in chain:
            done = run(line, checkout, environment)
            assert "this model was made for" not in done.stderr, line
            for file in re.findall(r"--(?:plot|output) (\S+)", line):
                assert (checkout / file).stat().st_size > 0, line

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(follow, chains.values()))
    answers = [json.loads(line) for line in (checkout / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == len((ROOT / "examples" / "prompts.jsonl").read_text().splitlines())


@pytest.mark.slow
def test_the_server_answers_as_it_is_started(checkout: Path, environment: dict[str, str]) -> None:
    (line,) = starting("mlx-kv serve")
    process = subprocess.Popen(
        f"exec {line} --port 0", shell=True, cwd=checkout, env=environment, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        url = next(each.split()[3].rstrip(",") for each in process.stderr if " at http" in each)
        body = json.dumps({"prompt": "import os", "max_tokens": 3}).encode()
        request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_program_runs(checkout: Path, environment: dict[str, str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.S)
    (checkout / "program.py").write_text(program)
    done = run(f"{sys.executable} program.py", checkout, {**environment, "PYTHONWARNINGS": "error::RuntimeWarning"})
    assert done.stdout.startswith('garnet"\nassert settings[')
    assert done.stderr == ""


def test_files_that_docs_and_commands_name_are_there() -> None:
    texts = [README, (ROOT / "Makefile").read_text(), *(file.read_text() for file in (ROOT / "docs").glob("*.md"))]
    named = set(re.findall(r"(?<![\w/.])(?:examples|mlx_kv|benchmarks|tools)/[\w./-]+\w", "\n".join(texts)))
    assert len(named) > 5
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
