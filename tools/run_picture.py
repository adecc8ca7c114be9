"""Draws a real run in a terminal, for the first run in docs/generate.md: docs/run.svg.

    python tools/run_picture.py [--output docs/run.svg]

Runs the commands below in a shell, as somebody would who has cloned this project and called `make generate` once, and
draws what they print. Decides which commands, and how a terminal looks; the picture fetches nothing, no font either.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
COMMANDS = (
    "grep -n olive_tunnel examples/unfinished.py",
    "mlx-kv generate --prompt-file examples/unfinished.py --kv-budget 512 --kv-bits 8 --max-tokens 24",
)
WIDTH = 100  # characters
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.S)  # from another site


def printed(command: str) -> str:
    """What a command prints, on either stream.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    asked = {**os.environ, "PATH": places}
    done = subprocess.run(command, shell=True, cwd=ROOT, env=asked, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def picture(runs: list[tuple[str, str]]) -> str:
    """An SVG of a terminal in which these commands printed this."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere)
        for command, said in runs:
            console.print(Text.assemble(("$ ", "dim"), (command, "bold")))
            console.print(Text(said.rstrip("\n")))
        drawn = console.export_svg(title="mlx-kv", unique_id="run")
    return FONTS.sub("", drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "run.svg")
    asked = parser.parse_args()
    asked.output.write_text(picture([(command, printed(command)) for command in COMMANDS]), encoding="utf-8")
    print(asked.output)


if __name__ == "__main__":
    main()
