"""The wheel on every Python that it is for: built once, installed into an empty environment of each, and tried there.

    python tools/pythons.py [--all]

Which Pythons those are, the classifiers of pyproject.toml say. Each is looked for on the PATH, among pyenv's, and by uv
where that is installed; one that is not found is named, and with --all an error. What is tried: the installation of the
wheel with what `constraints.txt` pins, the README's first command, and some of the tests, copied to where no checkout
is near. Ends in one JSON line, of each Python what came out. Knows nothing about how a wheel is made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = "[cpu]" if sys.platform == "linux" else ""
RUNNERS = ["pytest", "hypothesis"]
TESTS = ["cache/test_cache.py", "cache/test_rings.py", "files/test_serialization.py", "generation/test_generation.py"]
ASKED = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"


def supported() -> list[str]:
    """Versions such as 3.11, as the classifiers have them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each) for each in project["classifiers"]]
    return [each[1] for each in found if each]


def candidates(version: str) -> Iterator[str]:
    """Paths of what may be a Python of this version, the likeliest first."""
    if found := shutil.which(f"python{version}"):
        yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"), reverse=True))
    if uv := shutil.which("uv"):
        asked = [uv, "python", "find", "--no-project", "--no-python-downloads", version]
        done = subprocess.run(asked, capture_output=True, text=True)
        yield from done.stdout.split("\n")[:1] if done.returncode == 0 else []


def python_of(version: str) -> str | None:
    """The path of a Python of this version that can make environments; None where there is none."""
    for path in candidates(version):
        try:
            done = subprocess.run([path, "-c", ASKED], capture_output=True, text=True)
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == version:  # pyenv's shims are there for every version
            return path
    return None


def environment(profile: str) -> dict[str, str]:
    """Variables of a process that tests: nothing of this Python's, no hub, and a profile of random cases."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
    return kept | {"HF_HUB_OFFLINE": "1", "HYPOTHESIS_PROFILE": profile}


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command where no checkout is near.

    Raises:
        SystemExit: it failed; with the end of what it said.
    """
    words = list(map(str, command))
    done = subprocess.run(words, cwd=folder, env=environment("quick"), capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    return done


def try_python(python: str, wheel: Path, folder: Path) -> dict[str, object]:
    """Installs the wheel into an empty environment in `folder`, and runs it there."""
    begin = time.perf_counter()
    run(folder, python, "-m", "venv", "environment")
    binaries = folder / "environment" / "bin"
    pinned = ["--constraint", ROOT / "constraints.txt"]
    run(folder, binaries / "python", "-m", "pip", "install", "--quiet", *pinned, f"{wheel}{EXTRAS}", *RUNNERS)
    for each in ("tests", "examples"):
        shutil.copytree(ROOT / each, folder / each, ignore=shutil.ignore_patterns("__pycache__"))
    said = run(
        folder, binaries / "mlx-kv", "generate", "--prompt-file", "examples/unfinished.py", "--kv-budget", "512",
        "--kv-bits", "8", "--max-tokens", "40",
    )  # fmt: skip
    if not said.stdout.startswith('garnet"\n'):
        raise SystemExit(f"{python}: the README's first command says {said.stdout!r}")
    # A folder of its own, and no settings: those of pyproject.toml are for a checkout.
    paths = [f"tests/{each}" for each in TESTS]
    options = ["-q", "--quick", "--rootdir", folder / "tests", "-p", "no:cacheprovider"]
    tested = run(folder, binaries / "python", "-m", "pytest", *options, *paths)
    (passed,) = re.findall(r"(\d+) passed", tested.stdout) or [f"no test ran: {tested.stdout[-500:]}"]
    version = run(folder, binaries / "python", "-c", "import platform; print(platform.python_version())")
    return {"python": version.stdout.strip(), "passed": int(passed), "seconds": round(time.perf_counter() - begin)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="a Python that is not found is an error")
    options = parser.parse_args(arguments)
    found = {version: python_of(version) for version in supported()}
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder, sys.executable, "-m", "build", "--outdir", folder, ROOT)
        (wheel,) = folder.glob("*.whl")
        for version, python in found.items():
            if python is None:
                print(f"Python {version}: not found on this machine", file=sys.stderr)
                results[version] = None
                continue
            with tempfile.TemporaryDirectory() as own:
                results[version] = try_python(python, wheel, Path(own))
            print(f"Python {version}: {results[version]}", file=sys.stderr)
    print(json.dumps(results))
    missing = [version for version, result in results.items() if result is None]
    return 1 if len(missing) == len(results) or (options.all and missing) else 0


if __name__ == "__main__":
    sys.exit(main())
