"""A file of prompts, a JSON object on each line: what a line asks for, and which lines have still to be done.

Decides what a line must look like. Knows nothing about models, tokens or how an answer comes about.

    {"prompt": "a text" or [token ids], "max_tokens": 256, "id": "a text" or a number}

The digest of a request says which prompt and settings an answer belongs to. Lines are counted from 1; empty ones are
passed over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from mlx_kv.files.decoding import DuplicateKeyError, unique_keys

KEYS = ("prompt", "max_tokens", "id")
MOST_TOKENS = 2**31 - 1
BOM = b"\xef\xbb\xbf"

Id = str | int


@dataclass(frozen=True)
class BatchRequest:
    """What one line asks for.

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
    """Where the line of a request lies, so that no more than a few prompts are held at once."""

    number: int
    offset: int
    digest: str


@dataclass
class InputScan:
    """What is to be done of a file of prompts.

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
        raise ValueError(f"key {json.dumps(error.key)} is there twice: give it once") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason}): give one JSON object") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, column {error.colno}): give one JSON object") from error
    except RecursionError as error:
        raise ValueError("not JSON of ours (nested too deeply): give one JSON object") from error
    if not isinstance(entry, dict):
        raise ValueError(f'{_short(entry)} is no JSON object: give one such as {{"prompt": …}}')
    return entry


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt is no text ({error.reason}): leave out lone surrogates") from error
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
