"""Several ranks of one run, as processes on this machine, for tests.

Decides how ranks find each other (MLX's ring on ports of 127.0.0.1 that are free at the moment), how many threads each
of them has, and that none outlives its test: all are killed when it is over, or with the process that started them.
Knows nothing about what they do. As a program it calls a function of a file: `launching.py FILE FUNCTION ARGUMENT…`.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
# What a rank runs: a script, a function of words in a file that can be run, or arguments of the interpreter.
Program = Path | Callable[..., None] | Sequence[str]
MLX_KV = ("-m", "mlx_kv_command")  # the command, as a program


@dataclass(frozen=True)
class Finished:
    """What a rank left; `code` is negative if a signal ended it."""

    code: int
    stdout: str
    stderr: str

    @property
    def ours(self) -> list[str]:
        """Lines that we said on stderr; MLX's ring says its own in pieces, and a line of ours may come between two."""
        lines = [re.sub(r"^\[ring\].*?(?=mlx-kv: |$)", "", line) for line in self.stderr.splitlines()]
        return [line for line in lines if not re.match(r"$|[ \d]|ready$", line)]


class Ranks:
    """Ranks at work, in the order of their numbers.

    Attributes:
        processes: one for each.
    """

    def __init__(self, processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
        self.processes, self._folder = processes, folder

    def stdout(self, rank: int) -> str:
        """All that a rank has written so far."""
        return self._written(rank, "stdout")

    def stderr(self, rank: int) -> str:
        return self._written(rank, "stderr")

    def _written(self, rank: int, stream: str) -> str:
        return (self._folder / f"{rank}.{stream}").read_text(errors="replace")

    def wait_for(self, text: str, rank: int = 0, timeout: float = 60) -> str:
        """The first line of a rank's stderr that has this text, as soon as it is whole."""
        deadline = time.monotonic() + timeout
        while True:
            for line in self.stderr(rank).splitlines(keepends=True):
                if text in line and line.endswith("\n"):
                    return line.rstrip("\n")
            if self.processes[rank].poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no {text!r} of rank {rank}:\n{self.told()}")
            time.sleep(0.02)

    def wait(self, timeout: float = 60) -> list[Finished]:
        """What all of them left, when the last one has ended."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"ranks still run after {timeout:g} s:\n{self.told()}") from None
        return [
            Finished(process.returncode, self.stdout(rank), self.stderr(rank))
            for rank, process in enumerate(self.processes)
        ]

    def kill(self, rank: int, how: int = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(how)

    def told(self) -> str:
        """What each rank has written, for messages."""
        return "\n".join(
            f"--- rank {rank}, {'at work' if process.poll() is None else f'exit code {process.returncode}'}\n"
            f"{self.stdout(rank)[-2000:]}\n{self.stderr(rank)[-4000:]}"
            for rank, process in enumerate(self.processes)
        )


def run_ranks(
    size: int,
    program: Program,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    stdin: str = "",
) -> list[Finished]:
    """Runs a program on so many ranks, each with these arguments as words and this to read, until all have ended.

    Raises:
        AssertionError: some did not in time; it tells what all of them wrote.
    """
    with started_ranks(size, program, *arguments, env=env, stdin=stdin) as ranks:
        return ranks.wait(timeout)


def succeeded(finished: Sequence[Finished]) -> list[Finished]:
    """The same, where all ended well."""
    assert all(each.code == 0 for each in finished), "\n".join(
        f"--- rank {rank}, exit code {each.code}\n{each.stdout[-2000:]}\n{each.stderr[-4000:]}"
        for rank, each in enumerate(finished)
    )
    return list(finished)


@contextlib.contextmanager
def started_ranks(
    size: int,
    program: Program,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    each: Callable[[int], Sequence[object]] = lambda rank: (),
    stdin: str = "",
) -> Iterator[Ranks]:
    """Ranks at work; they are killed at the end.

    Args:
        each: more arguments, of a rank alone.
        stdin: what each may read.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / "stdin").write_text(stdin)
        hosts = folder / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(size)]))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(size):
                words = [*_words(program), *map(str, arguments), *map(str, each(rank))]
                own = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
                with (
                    open(folder / "stdin", "rb") as typed,
                    open(folder / f"{rank}.stdout", "wb") as out,
                    open(folder / f"{rank}.stderr", "wb") as err,
                ):
                    process = subprocess.Popen(
                        [sys.executable, *words],
                        stdin=typed,
                        stdout=out,
                        stderr=err,
                        env={**_environment(), **own, **(env or {})},
                        preexec_fn=_end_with_parent,
                        start_new_session=True,
                    )
                processes.append(process)
            yield Ranks(processes, folder)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            for process in processes:
                process.wait()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below those that the system gives to clients."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 32_000), 200):
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                tried.bind(("127.0.0.1", port))
                found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"no {count} free ports")


def _words(program: Program) -> list[str]:
    if isinstance(program, Path):
        return [str(program)]
    if callable(program):
        file = inspect.getsourcefile(program)
        assert file is not None
        return [__file__, str(Path(file).resolve()), program.__name__]
    return list(program)


def _environment() -> dict[str, str]:
    """One thread for each rank's BLAS, and the tests' own modules."""
    own = {"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    paths = [str(HERE.parent.parent), str(HERE.parent), str(HERE)]
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(":")}


def _end_with_parent() -> None:
    """Asks Linux to kill it when the test's own process is gone. Ctrl-C ends it even if tests run in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main() -> None:
    import mlx_kv  # noqa: F401  it loads a tuned BLAS before MLX

    file, function, *arguments = sys.argv[1:]
    runpy.run_path(file)[function](*arguments)


if __name__ == "__main__":
    main()
