"""Files of `mlx-kv batch`: prompts in, answers out, a JSON object per line.

    {"prompt": "a text" or [token ids], "max_tokens": 256, "id": "a text" or a number}
    {"id": …, "line": …, "digest": …, "text": …, …}

The digest identifies the prompt and the settings of an answer. Answers are written as whole lines, each once, by one
process at a time, so that a run can be killed at any moment. Lines are counted from 1; empty ones are skipped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from mlx_kv.files.atomic_write import atomic_write, lock
from mlx_kv.files.decoding import DuplicateKeyError, unique_keys
from mlx_kv.settings import MOST_TOKENS

KEYS = ("prompt", "max_tokens", "id")
BOM = b"\xef\xbb\xbf"

Id = str | int


@dataclass(frozen=True)
class BatchRequest:
    """The request of one line.

    Attributes:
        number: of the line.
        id: its own, else the number.
        prompt: a text that is not blank, or at least one token id from 0 up.
        max_tokens: to generate, from 1 up.
        digest: of prompt, max_tokens and settings.
    """

    number: int
    id: Id
    prompt: str | list[int]
    max_tokens: int
    digest: str


@dataclass(frozen=True)
class RequestLine:
    """The place of a request in its file: only a few prompts are in memory at once."""

    number: int
    offset: int
    digest: str


@dataclass
class InputScan:
    """The lines of a file of prompts, by what is to be done.

    Attributes:
        todo: the lines without an answer, in order.
        skipped: lines that have theirs.
        bad: numbers of lines that cannot be done, and why.
        changed: lines of `todo` whose id has an answer to another prompt, or by other settings.
    """

    todo: list[RequestLine] = field(default_factory=list)
    skipped: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)
    changed: list[tuple[int, Id]] = field(default_factory=list)


class InputFile:
    """A file of prompts, a JSON object on each line, read a line at a time.

    Args:
        file: open for bytes, and seekable.
        max_tokens: of lines that don't say.
        settings: all else that an answer depends on, in JSON's terms.
    """

    def __init__(self, file: IO[bytes], max_tokens: int, settings: Mapping[str, Any]) -> None:
        self._file, self._max_tokens = file, max_tokens
        self._settings = json.dumps(settings, sort_keys=True)

    def scan(self, done: Mapping[Id, str]) -> InputScan:
        """Reads the file once and keeps no prompt.

        Args:
            done: digests of the answers that there are, by id.
        """
        found = InputScan()
        lines: dict[Id, int] = {}
        for number, offset, raw in self._lines():
            try:
                request = self._request(number, raw)
                if request.id in lines:
                    raise ValueError(
                        f"id {json.dumps(request.id)} is that of line {lines[request.id]}: give each line its own"
                    )
            except ValueError as error:
                found.bad.append((number, str(error)))
                continue
            lines[request.id] = number
            if done.get(request.id) == request.digest:
                found.skipped += 1
                continue
            found.todo.append(RequestLine(number, offset, request.digest))
            if request.id in done:
                found.changed.append((number, request.id))
        return found

    def read(self, line: RequestLine) -> BatchRequest:
        """The request on a line that `scan` found.

        Raises:
            ValueError: the file has changed since.
        """
        self._file.seek(line.offset)
        with contextlib.suppress(ValueError):
            request = self._request(line.number, self._file.readline())
            if request.digest == line.digest:
                return request
        raise ValueError("has changed since this run began: start it again")

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        self._file.seek(0)
        offset = len(BOM) if self._file.read(len(BOM)) == BOM else 0
        self._file.seek(offset)
        for number, raw in enumerate(self._file, 1):
            if raw.strip():
                yield number, offset, raw
            offset += len(raw)

    def _request(self, number: int, raw: bytes) -> BatchRequest:
        entry = _entry(raw)
        for key in entry:
            if key not in KEYS:
                raise ValueError(f"unknown key {json.dumps(key)}: give prompt, max_tokens and id only")
        if "prompt" not in entry:
            raise ValueError('no "prompt": give a text or a list of token ids')
        prompt, limit, name = entry["prompt"], entry.get("max_tokens", self._max_tokens), entry.get("id", number)
        _check_prompt(prompt)
        if not is_whole(limit) or not 1 <= limit <= MOST_TOKENS:
            raise ValueError(f"max_tokens is {_short(limit)}: give a whole number from 1 up to {MOST_TOKENS:,}")
        if not (isinstance(name, str) or is_whole(name)):
            raise ValueError(f"id is {_short(name)}: give a text or a whole number")
        content = json.dumps([prompt, limit, self._settings]).encode()
        return BatchRequest(number, name, prompt, limit, hashlib.sha256(content).hexdigest()[:16])


def _entry(raw: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(raw.decode("utf-8").rstrip(), object_pairs_hook=unique_keys)
    except DuplicateKeyError as error:
        raise ValueError(f"key {json.dumps(error.key)} appears twice: give it once") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason}): give one JSON object") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, column {error.colno}): give one JSON object") from error
    except RecursionError as error:
        raise ValueError("not JSON of ours (nested too deeply): give one JSON object") from error
    if not isinstance(entry, dict):
        raise ValueError(f'{_short(entry)} is not a JSON object: give one such as {{"prompt": …}}')
    return entry


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt is not text ({error.reason}): leave out lone surrogates") from error
    elif not isinstance(prompt, list):
        raise ValueError(f"prompt is {_short(prompt)}: give a text or a list of token ids")
    else:
        for token in prompt:
            if not is_whole(token) or token < 0:
                raise ValueError(f"prompt has the token {_short(token)}: give whole numbers from 0 up")
    if not (prompt.strip() if isinstance(prompt, str) else prompt):
        raise ValueError("the prompt is empty: give at least one word or token")


def is_whole(value: Any) -> bool:
    """Whether it is a whole number of JSON."""
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


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
        """Removes the answers of these ids: a new file without them replaces the old one at once."""
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
        """Closes the file and frees its lock."""
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
                raise ValueError(f"{path} is not a regular file: give one that can be read again")
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
    """Answers to a stream that cannot be read again: each is written once, and none is found there."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.done: dict[Id, str] = {}

    def append(self, request: BatchRequest, answer: Mapping[str, Any]) -> None:
        """One more line, flushed when this returns.

        Raises:
            OSError: it cannot be written.
        """
        self._stream.write(_line(request, answer))
        self._stream.flush()

    def drop(self, ids: Collection[Id]) -> None:
        """Nothing: a stream has no earlier answers."""

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
