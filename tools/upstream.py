"""The tests on the newest packages: what will break when the bounds in pyproject.toml are raised.

    python tools/upstream.py [--processes N] [TESTS ...]

Makes an environment in build/upstream, installs the newest mlx, mlx-lm, mlx-vlm and all else that tests need, without
the upper bounds of pyproject.toml, and runs there the tests that `make test` runs, or those of TESTS. Before them, it
looks up each name of mlx-lm and mlx-vlm that the package uses: most are in no documentation, so that any release may
drop them. Ends in one JSON line: the versions, those beyond pyproject.toml, the names that are gone, and the tests that
broke. The exit status is 0 if all passed.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from pythons import environment, run

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "upstream"
MARK = "made-by-mlx-kv-upstream"  # a file in environments of this tool, which may be deleted
EXTRAS = ["plot", "server", "test", "dev", "vision", *(["cpu"] if sys.platform == "linux" else [])]
LOWER = (">=", ">", "!=")
WATCHED = ("mlx", "mlx-lm", "mlx-vlm")
MODULES = ("mlx_lm", "mlx_vlm")
BROKEN = re.compile(r"^(?:FAILED|ERROR) (tests/.*)")
PASSED = re.compile(r"\b(\d+) passed\b")
LOOKED_UP = """
import functools, json, pkgutil, sys
import mlx_kv
def found(name):
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
print(json.dumps([name for name in sys.argv[1:] if not found(name)]))
"""


# --- what is installed ------------------------------------------------------------------------------------------------


def requirements() -> dict[str, Requirement]:
    """What the tests need, by name, with the ranges of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    return {canonicalize_name(each.name): each for each in map(Requirement, lines)}


def without_upper_bounds(asked: Requirement) -> str:
    """The same requirement, of any newer version."""
    newer = Requirement(str(asked))
    newer.specifier = SpecifierSet(",".join(str(each) for each in asked.specifier if each.operator in LOWER))
    return str(newer)


def beyond(versions: dict[str, str]) -> dict[str, str]:
    """Packages outside the ranges of pyproject.toml, with the range of each."""
    asked = requirements()
    return {
        name: str(asked[name].specifier)
        for name, version in sorted(versions.items())
        if name in asked and not asked[name].specifier.contains(version, prereleases=True)
    }


def make_environment(folder: Path) -> Path:
    """An empty environment; returns its Python.

    Raises:
        SystemExit: there is something else in the folder.
    """
    if folder.exists():
        if not (folder / MARK).is_file():
            raise SystemExit(f"{folder} is no environment of this tool: move it elsewhere, or delete it yourself")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()
    run(ROOT, sys.executable, "-m", "venv", folder)
    return folder / "bin" / "python"


def install(python: Path) -> dict[str, str]:
    """Installs the newest packages and this checkout; returns the versions of what pyproject.toml asks for."""
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    run(ROOT, *pip, "install", "--quiet", "--no-compile", *map(without_upper_bounds, requirements().values()))
    run(ROOT, *pip, "install", "--quiet", "--no-deps", "--editable", ROOT)
    listed = json.loads(run(ROOT, *pip, "list", "--format", "json").stdout)
    versions = {canonicalize_name(each["name"]): each["version"] for each in listed}
    return {name: version for name, version in versions.items() if name in requirements()}


# --- names that we use ------------------------------------------------------------------------------------------------


def names_in(source: str) -> Iterator[str]:
    """The names of mlx-lm and mlx-vlm that a file imports, and their attributes that it reads: dotted."""
    tree, imported = ast.parse(source), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    yield from imported.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            yield f"{imported[node.value.id]}.{node.attr}"


def names_used() -> list[str]:
    """Of the whole package, each once."""
    files = sorted((ROOT / "mlx_kv").rglob("*.py"))
    return sorted({name for path in files for name in names_in(path.read_text(encoding="utf-8"))})


def names_gone(python: Path) -> list[str]:
    """The names that an environment does not have."""
    gone: list[str] = json.loads(run(ROOT, python, "-c", LOOKED_UP, *names_used()).stdout.splitlines()[-1])
    return gone


# --- tests ------------------------------------------------------------------------------------------------------------


def run_tests(python: Path, paths: Sequence[str], processes: str) -> tuple[int, list[str], int]:
    """Runs tests, and shows their output; returns how many passed, those that broke, and pytest's exit code."""
    options = ["-m", "pytest", "-p", "no:cacheprovider", "-rfE", "--tb=short", "--cover", "--numprocesses", processes]
    words = [str(python), *options, "--dist", "worksteal", *paths]
    passed, broken = 0, list[str]()
    with subprocess.Popen(words, cwd=ROOT, env=environment("usual"), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            broken += BROKEN.findall(line.rstrip())
            passed = int(found[1]) if (found := PASSED.search(line)) else passed
    return passed, broken, running.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", default="auto", metavar="N", help="tests side by side")
    parser.add_argument("tests", nargs="*", help="files or folders of tests in place of all")
    options = parser.parse_args(arguments)
    python = make_environment(FOLDER)
    versions = install(python)
    newer, gone = beyond(versions), names_gone(python)
    print("with " + ", ".join(f"{name} {versions[name]}" for name in WATCHED), file=sys.stderr)
    for name, allowed in newer.items():
        print(f"{name} {versions[name]} is beyond pyproject.toml ({allowed})", file=sys.stderr)
    for name in gone:
        print(f"gone: {name}", file=sys.stderr)
    passed, broken, code = run_tests(python, options.tests, options.processes)
    watched = {name: versions[name] for name in WATCHED}
    print(json.dumps({"versions": watched, "beyond": newer, "gone": gone, "passed": passed, "broken": broken}))
    return 0 if code == 0 and not gone else 1


if __name__ == "__main__":
    sys.exit(main())
