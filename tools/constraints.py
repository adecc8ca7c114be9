"""constraints.txt and constraints-cuda.txt: one version of everything that is needed, as pip resolves it now.

    python tools/constraints.py

There are two, since MLX for an NVIDIA GPU and PyTorch (of the extra `train`) want other versions of NVIDIA's libraries:
one for all extras but `cuda`, and one for `cuda` with what users have beside it. Nothing is installed, and no GPU is
needed. Run it with the oldest Python that is supported: what that gets, newer ones get, too. Only names and versions
are written, never where they came from. Decides what a line is; which versions go together pip decides.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
MAKERS = {"train", "test", "dev", "docs"}  # extras of those who work on the package


def files() -> dict[str, set[str]]:
    """The extras that each file is for."""
    extras = set(project()["optional-dependencies"])
    return {"constraints.txt": extras - {"cuda"}, "constraints-cuda.txt": extras - {"cpu"} - MAKERS}


def project() -> dict[str, Any]:
    told: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return told


def resolve(extras: Iterable[str], to: Path) -> None:
    """Has pip write what it would install for these extras."""
    wanted = f"{ROOT}[{','.join(sorted(extras))}]"
    asked = ["install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(to), wanted]
    subprocess.run([sys.executable, "-m", "pip", *asked], check=True)


def lines(report: Mapping[str, Any]) -> list[str]:
    """A pin for each distribution of one of pip's reports but our own, in order.

    A version is that of the index: a build of it for one kind of machine (`2.13.0+cpu`) is the same version.
    """
    found = {canonicalize_name(each["metadata"]["name"]): each["metadata"]["version"] for each in report["install"]}
    own = canonicalize_name(project()["name"])
    return [f"{name}=={Version(version).public}" for name, version in sorted(found.items()) if name != own]


def text(file: str, extras: Iterable[str], report: Mapping[str, Any]) -> str:
    where = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    some = "cuda,server" if "cuda" in extras else "cpu,server"
    return "\n".join(
        [
            f"# Made by `make constraints`: all that mlx-kv and its extras ({', '.join(sorted(extras))})",
            f'# need, in versions that go together:  pip install --constraint {file} ".[{some}]"',
            f"# Resolved by {where}. What other systems need instead (mlx-metal) is not here.",
            *lines(report),
            "",
        ]
    )


def main() -> None:
    for file, extras in files().items():
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            resolve(extras, report)
            written = text(file, extras, json.loads(report.read_text(encoding="utf-8")))
        (ROOT / file).write_text(written, encoding="utf-8")
        print(file)


if __name__ == "__main__":
    main()
