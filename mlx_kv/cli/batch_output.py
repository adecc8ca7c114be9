"""A file of answers, and one more line: what is done already, and what another run may not touch.

Decides how an answer is written so that a run can be killed at any moment: whole lines only, each once, by one process
at a time. Knows nothing about models or tokens, nor how an answer comes about.

    {"id": …, "line": …, "digest": …, and what the caller adds}
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mlx_kv.cli.batch_input import BatchRequest, Id, is_whole
from mlx_kv.files.atomic_write import atomic_write, lock

BEGINNING = b'{"id": '  # of every line that is written here


class OutputFile:
    """The file of answers, locked against other runs until it is closed.

    Opening reads what is there. A last line that is not whole, since a run was killed or the disk was full, is cut off,
    once all before it turned out to be answers.

    Attributes:
        done: the digest of each answer, by id.

    Raises:
        ValueError: another run has the file, it is no regular file, or holds anything that is no answer; it is then
            left as it was.
        OSError: it cannot be opened, read or locked.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = os.path.realpath(path)  # a link stays one when the file is replaced
        self._file = self._locked()
        try:
            self.done, whole = self._recover()
            if whole < os.fstat(self._file).st_size:
                os.ftruncate(self._file, whole)
        except BaseException:
            self.close()
            raise

    def append(self, request: BatchRequest, answer: Mapping[str, Any]) -> None:
        """One more line, on the disk when this returns. A line that does not fit is taken back.

        Raises:
            OSError: it could not be written.
        """
        line = _line(request, answer)
        before = os.fstat(self._file).st_size
        written = os.write(self._file, line)
        if written < len(line):
            os.ftruncate(self._file, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        os.fsync(self._file)
        self.done[request.id] = request.digest

    def drop(self, ids: Collection[Id]) -> None:
        """Takes out the answers of these ids: a new file without them takes the place of the old one, all at once."""
        after = -1
        try:
            with atomic_write(self._path) as new, open(self._file, "rb", closefd=False) as old:
                old.seek(0)
                new.writelines(raw for raw in old if json.loads(raw)["id"] not in ids)
                after = os.dup(new.fileno())  # with its lock
                fcntl.fcntl(after, fcntl.F_SETFL, os.O_APPEND)
        finally:
            if after >= 0 and os.path.samestat(os.fstat(after), os.stat(self._path)):
                self._file, after = after, self._file
            if after >= 0:
                os.close(after)
        for each in ids:
            self.done.pop(each, None)

    def close(self) -> None:
        """Lets other runs have the file."""
        os.close(self._file)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _locked(self) -> int:
        path = self._path
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ValueError(f"{path} is no regular file: give one that can be read again")
            if not lock(file, wait=False) or os.fstat(file).st_ino != os.stat(path).st_ino:
                raise BlockingIOError  # the other run has it, or put a new file in its place
        except BlockingIOError:
            os.close(file)
            raise ValueError(f"another run writes {path}: wait for it, or give another file") from None
        except BaseException:
            os.close(file)
            raise
        return file

    def _recover(self) -> tuple[dict[Id, str], int]:
        """Digests by id, and the bytes of the lines that are whole."""
        done: dict[Id, str] = {}
        whole = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n") and _half(raw):
                    break
                answer = _answer(raw)
                if answer is None or answer[0] in done:
                    what = "is no answer" if answer is None else f"is another answer of id {json.dumps(answer[0])}"
                    raise ValueError(f"line {number} of {self._path} {what} of this command: give another file")
                if not raw.endswith(b"\n"):
                    break  # whole but for its end: done again
                done[answer[0]] = answer[1]
                whole += len(raw)
        return done, whole


class OutputStream:
    """Answers that go where nothing can be read again: each is written once, and none is found to be there already."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.done: dict[Id, str] = {}

    def append(self, request: BatchRequest, answer: Mapping[str, Any]) -> None:
        """One more line, handed on when this returns.

        Raises:
            OSError: nobody takes it.
        """
        self._stream.write(_line(request, answer))
        self._stream.flush()

    def drop(self, ids: Collection[Id]) -> None:
        """There are none."""

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, *exception: object) -> None: ...


def _line(request: BatchRequest, answer: Mapping[str, Any]) -> bytes:
    line = json.dumps({"id": request.id, "line": request.number, "digest": request.digest, **answer}).encode() + b"\n"
    assert line.startswith(BEGINNING)
    return line


def _half(raw: bytes) -> bool:
    """Whether this may be the first part of a line that was written here, and is no JSON of its own."""
    if not (raw.startswith(BEGINNING) or BEGINNING.startswith(raw)):
        return False
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return True
    return False


def _answer(raw: bytes) -> tuple[Id, str] | None:
    """Id and digest of a line that was written here, else None."""
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not (raw.startswith(BEGINNING) and isinstance(entry, dict)):
        return None
    name, number, digest = (entry.get(key) for key in ("id", "line", "digest"))
    ours = (isinstance(name, str) or is_whole(name)) and is_whole(number) and isinstance(digest, str)
    return (name, digest) if ours else None  # type: ignore[return-value]
