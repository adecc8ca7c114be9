"""What a page of Markdown shows, as blocks in its order, and a folder and a shell in which they run as they stand.

A block is indented commands, a program of Python, or what those before it print. Commands run line by line (a line that
ends in a backslash goes on). A program whose first line is the name of a file (`# ask.py`) becomes that file; any other
is run at once. `mlx-kv serve` runs until the page is done, on a free port in the place of 8080. Decides what a block is
and how it runs; what stands in for what cannot run here, a test says (`Shell.instead`). Knows nothing about what pages
claim.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parent.parent
PROGRAMS = ("git", "make", "pip", "mlx-kv", "mlx.launch", "echo", "python", "(")
ADDRESS = "http://127.0.0.1:8080"  # where a page finds its server
BLOCK = re.compile(
    r"^```(?P<language>\w*)\n(?P<fenced>(?:.*\n)*?)^```$|^#+ (?P<heading>.+)$"
    r"|(?<=\n\n)(?P<indented>(?:    .*\n|\n(?=    ))+)",
    re.M,
)
TIMES = re.compile(r"[\d.,]+(?= ?(?:tokens/s|s\b))|(?<=peak memory ).*")


@dataclass(frozen=True)
class Block:
    """One block of a page, without its fence or indent; `heading` is that of its section."""

    heading: str
    kind: Literal["commands", "python", "shown"]
    text: str

    @property
    def commands(self) -> list[str]:
        return [line for line in self.text.replace("\\\n", "").splitlines() if line]


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page that has this text."""
    heading = ""
    for found in BLOCK.finditer(page):
        if found["heading"] is not None:
            heading = found["heading"]
        elif found["language"] == "python":
            yield Block(heading, "python", found["fenced"])
        elif found["indented"] is not None:
            text = re.sub(r"^    ", "", found["indented"], flags=re.M)
            yield Block(heading, "commands" if text.startswith(PROGRAMS) else "shown", text)
        else:
            yield Block(heading, "shown", found["fenced"])


def commands(page: str) -> list[str]:
    """Every command of a page."""
    return [line for block in blocks(page) if block.kind == "commands" for line in block.commands]


def without_times(text: str, varies: str = r"(?!)") -> list[str]:
    """The lines, without what depends on how fast a machine is; and without what matches `varies`, line by line."""
    lines = re.sub(varies, "", TIMES.sub("", text), flags=re.M).splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def fresh_checkout(folder: Path) -> Path:
    """A copy of the checkout, of what git has, more or less."""
    hidden = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "site")
    return Path(shutil.copytree(ROOT, folder / "mlx-kv", ignore=hidden))


def empty_environment(home: Path, binaries: Path = Path(sys.executable).parent) -> dict[str, str]:
    """Of a user whose home is empty, and who has set nothing; programs of `binaries` come first."""
    own = ("PYTHON", "HF_", "XDG_", "MAKE", "MFLAGS")  # a make inside of another one says more than it would alone
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


@dataclass
class Shell:
    """Runs blocks in a folder.

    Attributes:
        instead: what stands in for parts of a text, by what they are.
        varies: a pattern of what is not the same in every run, times aside.
        longest: seconds that a command may take.
        said: what was printed since something was last shown, stdout before stderr of each command.
    """

    folder: Path
    environment: dict[str, str]
    instead: dict[str, str] = field(default_factory=dict)
    varies: str = r"(?!)"
    longest: float = 300
    said: str = ""
    _servers: list[subprocess.Popen[str]] = field(default_factory=list)

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.kill()
            server.wait()

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Runs one command, which must end well; `mlx-kv serve` is started, and goes on."""
        line = self._here(line)
        if line.startswith("mlx-kv serve"):
            return self._serve(line)
        words = ["bash", "-c", line]
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=self.longest
        )
        assert done.returncode == 0, f"{line}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        self.said += f"{done.stdout}\n{done.stderr}\n"
        return done

    def run_block(self, block: Block) -> str:
        """Runs a block, and returns what it prints; each line that is shown must have been printed, in that order."""
        before = len(self.said)
        if block.kind == "shown":
            said = iter(without_times(self.said, self.varies))
            for line in without_times(block.text, self.varies):
                assert line in said, f"not printed, or not there: {line}\n{self.said}"
            self.said = ""
            return ""
        if block.kind == "commands":
            for line in block.commands:
                self.run(line)
        else:
            named = re.match(r"# ([\w.]+\.py)\n", block.text)
            name = named[1] if named else "program.py"
            (self.folder / name).write_text(self._here(block.text), encoding="utf-8")
            if not named:
                self.run(f"python {name}")
        return self.said[before:]

    def end_servers(self) -> None:
        """As a service manager would; they must end well."""
        for server in self._servers:
            server.send_signal(signal.SIGTERM)
        assert [server.wait(timeout=60) for server in self._servers] == [0] * len(self._servers)
        self._servers.clear()

    def _here(self, text: str) -> str:
        for word, other in self.instead.items():
            text = text.replace(word, other)
        return text

    def _serve(self, line: str) -> subprocess.CompletedProcess[str]:
        line = f"exec {line.partition('#')[0]} --port 0"
        process = subprocess.Popen(
            ["bash", "-c", line], cwd=self.folder, env=self.environment, stderr=subprocess.PIPE, text=True
        )
        self._servers.append(process)
        assert process.stderr is not None
        url = next(each.split()[3].rstrip(",") for each in process.stderr if " at http" in each)
        self.instead[ADDRESS] = url.removesuffix("/v1")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # or it would wait for a reader
        return subprocess.CompletedProcess(line, 0, "", "")
