"""constraints.txt: one version of everything that this package and all its extras need, as pip resolves them now.

    python tools/constraints.py [--report FILE]

Nothing is installed. Run it with the oldest Python that is supported: what that gets, the newer ones get, too. On a
machine without an NVIDIA GPU it works as well. Only names and versions are written, never where they came from. Decides
what a line is; which versions go together pip decides.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
FILE = ROOT / "constraints.txt"


def project() -> dict[str, Any]:
    told: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return told


def resolve(to: Path) -> None:
    """Has pip write what it would install for all extras."""
    extras = ",".join(project()["optional-dependencies"])
    asked = ["install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(to), f"{ROOT}[{extras}]"]
    subprocess.run([sys.executable, "-m", "pip", *asked], check=True)


def lines(report: Mapping[str, Any]) -> list[str]:
    """A pin for each distribution of one of pip's reports but our own, in order.

    A version is that of the index: a build of it for one kind of machine (`2.13.0+cpu`) is the same version.
    """
    found = {canonicalize_name(each["metadata"]["name"]): each["metadata"]["version"] for each in report["install"]}
    own = canonicalize_name(project()["name"])
    return [f"{name}=={Version(version).public}" for name, version in sorted(found.items()) if name != own]


def text(report: Mapping[str, Any]) -> str:
    where = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    return "\n".join(
        [
            "# Made by `make constraints`: all that mlx-kv and its extras need, in versions that go together, for",
            '#     pip install --constraint constraints.txt ".[cpu,server]"',
            f"# Resolved by {where}. What other systems need instead (mlx-metal) is not here.",
            *lines(report),
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--report", type=Path, help="one that pip has written already")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report = options.report or Path(folder) / "report.json"
        if options.report is None:
            resolve(report)
        FILE.write_text(text(json.loads(report.read_text(encoding="utf-8"))), encoding="utf-8")
    print(FILE.relative_to(ROOT))


if __name__ == "__main__":
    main()
