"""README.md, generate.md and the examples of settings.md as a newcomer has them: a clone, an empty home, Python, make.

    python tools/fresh.py [--all] [--agents FOLDER]

Clones what this checkout has committed, and runs there what the pages show, in their order: `make generate` and
`make test` set themselves up from a package index, the rest runs in the environment that they made. What is not as it
stands: PYTEST_ADDOPTS tells `make test` a few files (all of them are `make test` itself), `pip install` only looks what
it would do. With --agents, Claude Code and opencode, which `npm install --prefix FOLDER` has put there (versions:
benchmarks/agents.py), change a file as the README sets them up; the model is written by a script, all else is as the
README has it. Ends in one JSON line: seconds for each part. Without a package index nothing can be
tried: it says so, and with --all that is an error. Knows nothing about what pages claim: their tests do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

sys.path.append(str(ROOT / "tests"))

import recipes  # noqa: E402
from pages import ADDRESS, Block, Shell, blocks  # noqa: E402

# Besides Python, git and make: what every system has, and Makefile, README or examples use.
SYSTEM = (
    "sh",
    "bash",
    "env",
    "uname",
    "touch",
    "rm",
    "mkdir",
    "grep",
    "head",
    "cat",
    "cmp",
    "sed",
    "dirname",
    "mktemp",
)
OF_THE_INDEX = ("PIP_", "SSL_CERT", "REQUESTS_CA", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")  # where packages come from
PAGES = ("README.md", "docs/generate.md", "docs/settings.md")
SHORT_TEST = "--quick tests/cache/test_rings.py tests/files/test_serialization.py"
LONGEST = 900.0  # seconds of one command: packages of some hundred MB are fetched
ASKED = "click"  # any package that we need


def programs(folder: Path) -> Path:
    """A folder with nothing but the programs that a newcomer has.

    Raises:
        SystemExit: one of them is not on this machine.
    """
    folder.mkdir()
    python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    found = {name: shutil.which(name) for name in ("git", "make", *SYSTEM)} | {"python3": str(python)}
    for name, path in found.items():
        if path is None:
            raise SystemExit(f"there is no {name} on this machine: a newcomer needs it")
        (folder / name).write_text(f'#!/bin/sh\nexec "{path}" "$@"\n')  # a link would take Python's own folder away
        (folder / name).chmod(0o755)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """An empty home, those programs, and the way to packages that this machine has."""
    home = folder / "home"
    home.mkdir()
    index = {name: value for name, value in os.environ.items() if name.upper().startswith(OF_THE_INDEX)}
    for own in (Path.home() / ".config" / "pip" / "pip.conf", Path.home() / ".pip" / "pip.conf"):
        if own.is_file():
            index.setdefault("PIP_CONFIG_FILE", str(own))
    return {**index, "HOME": str(home), "PATH": str(programs(folder / "programs")), "LANG": "C.UTF-8"}


def no_index(python: Path, folder: Path, told: dict[str, str]) -> str:
    """Why no package can be had; empty where one came."""
    words = ["pip", "download", "--quiet", "--no-deps", "--retries", "0", "--timeout", "15", "--dest", "probe", ASKED]
    done = subprocess.run([python, "-m", *words], cwd=folder, env=told, capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def run_block(block: Block, shell: Shell) -> None:
    """A block of a page, where there is a clone."""
    if block.kind != "commands":
        shell.run_block(block)
        return
    for line in block.commands:
        if line.startswith("pip install"):
            if line.partition("#")[2].strip() in ("", {"linux": "Linux", "darwin": "macOS"}[sys.platform]):
                shell.run(line.replace("pip install", "pip install --quiet --dry-run"))
        elif not line.startswith("git clone"):
            shell.run(line)


def try_pages(folder: Path, told: dict[str, str]) -> dict[str, float]:
    """Runs all in a clone; returns the seconds of each part."""
    subprocess.run(["git", "clone", "--quiet", ROOT, folder / "mlx-kv"], check=True)
    clone = folder / "mlx-kv"
    binaries = {**told, "PATH": f"{clone / '.venv' / 'bin'}{os.pathsep}{told['PATH']}", "PYTEST_ADDOPTS": SHORT_TEST}
    seconds: dict[str, float] = {}
    for page in PAGES:
        found = list(blocks((clone / page).read_text(encoding="utf-8")))
        if page == "docs/settings.md":
            found = [block for block in found if block.heading.startswith(recipes.EXAMPLE)]
        else:  # what is shown there is not the output of the commands above it: tests/test_readme.py compares it
            found = [block for block in found if block.kind != "shown"]
        for heading, parts in itertools.groupby(found, lambda block: block.heading):
            instead, begin = recipes.stand_ins(), time.perf_counter()
            with Shell(clone, binaries, instead, recipes.VARIES, LONGEST) as shell:
                for block in parts:
                    run_block(block, shell)
                shell.end_servers()
            seconds[f"{page}: {heading}"] = round(time.perf_counter() - begin, 1)
            print(f"{page}: {heading}: {seconds[f'{page}: {heading}']} s", file=sys.stderr, flush=True)
    return seconds


def try_agents(folder: Path, told: dict[str, str], programs: Path) -> dict[str, bool]:
    """Whether Claude Code and opencode change a file, with the settings and the server of the README.

    Args:
        folder: with the clone, in which `make generate` has run.
        programs: of npm, with both clients.
    """
    clone, work = folder / "mlx-kv", folder / "work"
    python, model = clone / ".venv" / "bin" / "python", folder / "scripted"
    scripted = [python, "benchmarks/agents.py"]
    model.mkdir()
    subprocess.run([*scripted, "--make", model], cwd=clone, env=told, check=True)
    # The command, with a model whose answers a script writes.
    (folder / "commands").mkdir()
    server = folder / "commands" / "mlx-kv"
    words = " ".join(f'"{word}"' for word in (python, clone / "benchmarks" / "agents.py", "--serve", model))
    server.write_text(f'#!/bin/sh\nshift\nexec {words} "$@"\n')
    server.chmod(0o755)
    page = (clone / "README.md").read_text(encoding="utf-8")
    page = page[page.index("## A coding agent") : page.index("## The caches")]
    (serve,) = [line for block in blocks(page) for line in block.commands if line.startswith("mlx-kv serve")]
    (exports,) = [block for block in blocks(page) if block.text.startswith("export ")]
    (settings,) = [block for block in blocks(page) if block.text.startswith("{")]
    binaries = [folder / "commands", programs / "node_modules" / ".bin", Path(shutil.which("node") or "").parent]
    told = {**told, "PATH": os.pathsep.join([*map(str, binaries), told["PATH"]])}
    found = {}
    with Shell(clone, told, {serve: re.sub(r"--model \S+ ", "", serve)}) as shell:
        shell.run(serve)
        for name, run in (("claude", 'claude -p "{}" --allowedTools Read,Edit'), ("opencode", 'opencode run "{}"')):
            file = work / name / "shelf.py"
            file.parent.mkdir(parents=True)
            file.write_text("shelf = []\n")
            subprocess.run(["git", "init", "-q", "."], cwd=file.parent, env=told, check=True)
            (file.parent / "opencode.json").write_text(settings.text.replace(ADDRESS, shell.instead[ADDRESS]))
            asked = run.format(f"Read the file {file} please, and replace the word shelf by shelves in it.")
            lines = [line for line in exports.commands if line != "claude"]
            Shell(file.parent, told, shell.instead).run("\n".join([*lines, f"{asked} < /dev/null"]))
            found[name] = file.read_text() == "shelves = []\n"
            print(f"{name}: {'changed the file' if found[name] else 'did NOT change the file'}", file=sys.stderr)
        shell.end_servers()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="that no package index is reached is an error")
    parser.add_argument("--agents", type=Path, help="where npm has installed Claude Code and opencode")
    options = parser.parse_args(arguments)
    for name in ("claude", "opencode") if options.agents else ():
        if not (options.agents / "node_modules" / ".bin" / name).exists():
            parser.error(f"--agents {options.agents}: {name} is not there; benchmarks/agents.py says how to install it")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = environment(folder)
        subprocess.run(["python3", "-m", "venv", "asks"], cwd=folder, env=told, check=True)
        if why := no_index(folder / "asks" / "bin" / "python", folder, told):
            print(f"no package index can be reached, so nothing was tried: {why}", file=sys.stderr)
            print(json.dumps({"skipped": why}))
            return 1 if options.all else 0
        found: dict[str, Any] = dict(try_pages(folder, told))
        if options.agents is not None:
            found |= try_agents(folder, told, options.agents.resolve())
        print(json.dumps(found))
        return 1 if False in found.values() else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
