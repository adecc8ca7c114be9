"""Every write, flush, rename and allocation fails once.

The calls are counted in a run in which nothing fails; then call 1 fails, then call 2, and so on, each with every error.
"""

from __future__ import annotations

import builtins
import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ERRORS: tuple[Exception, ...] = (
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EIO, "I/O error"),
    MemoryError("no memory"),
)
OS = ("open", "fdopen", "fsync", "replace", "fchmod", "fchown", "dup", "write", "ftruncate", "listdir")
PATH = ("mkdir", "read_bytes", "write_bytes", "unlink", "stat")


class Written:
    """A file whose writes and flushes are counted, too."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        return self._faults.counted(name, found) if name in ("write", "flush", "writelines") else found

    def __enter__(self) -> Written:
        self._file.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.__exit__(*exception)


class Faults:
    """Counts calls, and has one of them fail, before it has done anything."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.fails, self.error = 0, Exception()
        self.inside = False
        for name in OS:
            patch.setattr(os, name, self.counted(f"os.{name}", getattr(os, name)))
        patch.setattr(builtins, "open", self.counted("open", builtins.open))
        patch.setattr(tempfile, "mkdtemp", self.counted("mkdtemp", tempfile.mkdtemp))
        patch.setattr("mlx_kv.files.serialization.json.dumps", self.counted("dumps", json.dumps))
        for name in PATH:
            patch.setattr(Path, name, self.counted(f"path.{name}", getattr(Path, name)))

    def counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            if self.inside or not self.names_wanted:
                return call(*arguments, **options)
            self.names.append(name)
            if len(self.names) == self.fails:
                raise self.error
            self.inside = name.startswith(("path.", "mkdtemp"))  # what they do inside is theirs
            try:
                made = call(*arguments, **options)
            finally:
                self.inside = False
            return Written(made, self) if name == "os.fdopen" else made

        return counting

    names_wanted = False

    @contextmanager
    def failing(self, call: int, error: Exception) -> Iterator[None]:
        """Within, this call fails; 0 is none."""
        self.names, self.fails, self.error, self.names_wanted = [], call, error, True
        try:
            yield
        finally:
            self.names_wanted = False


def everything(run: Callable[[Path], None], faults: Faults, folder: Callable[[], Path]) -> Iterator[tuple[Path, str]]:
    """Places where `run` has failed, at every call that it makes and with every error, and what failed."""
    place = folder()
    with faults.failing(0, ERRORS[0]):
        run(place)
    names = list(faults.names)
    assert len(names) > 3
    for call in range(1, len(names) + 1):
        for error in ERRORS:
            place = folder()
            raised: BaseException | None = None
            with faults.failing(call, error):
                try:
                    run(place)
                except (OSError, MemoryError, ValueError) as caught:
                    raised = caught
            if raised is not None:
                assert str(raised).count("\n") == 0
                assert str(error.args[-1]) in str(raised)
            yield place, f"{names[call - 1]} ({call}): {error!r}, raised {raised!r}"
