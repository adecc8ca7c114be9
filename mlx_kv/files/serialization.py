"""Prompt cache files: written, read and checked.

A file is a safetensors file whose metadata has a version, a description in JSON (`schema`) and its checksum; the
description has a digest of each array. Files of mlx-lm are read, too (`stock_files`).
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from msgspec import UNSET

from mlx_kv.cache.checks import check_type, token_ids
from mlx_kv.files import stock_files, tensor_files
from mlx_kv.files.atomic_write import check_replaceable
from mlx_kv.files.caches import describe, restore
from mlx_kv.files.decoding import check_shape, decode, read_json
from mlx_kv.files.fingerprint import model_fingerprint
from mlx_kv.files.schema import Description

__all__ = ["PromptFile", "load_prompt_cache", "load_prompt_file", "model_fingerprint", "save_prompt_cache"]

VERSION = "1"
VERSION_WORD = "mlx_kv_prompt_cache"  # in the metadata of each file
_one_file = threading.Lock()  # layers of one sequence find each other in the order in which they are made


@dataclass(frozen=True)
class PromptFile:
    """The contents of a file.

    Attributes:
        caches: one for each layer, ready to continue.
        metadata: saved with them.
        tokens: the token ids that the caches have read; None if they were not saved.
        fingerprint: of the model; None if it was not saved.
        stock: whether mlx-lm wrote it.
    """

    caches: list[Any]
    metadata: dict[str, str]
    tokens: list[int] | None = None
    fingerprint: str | None = None
    stock: bool = False


def save_prompt_cache(
    path: str | Path,
    caches: Sequence[Any],
    metadata: Mapping[str, str] | None = None,
    *,
    tokens: Sequence[int] | None = None,
    fingerprint: str | None = None,
    format: Literal["mlx-kv"] = "mlx-kv",
    force: bool = False,
) -> None:
    """Writes the caches of a model to a file, atomically: an older file stays until the new one is on the disk.

    Only a prompt cache of ours or of mlx-lm's or an empty file is replaced. The new file has the mode of the old one,
    so a private file stays private; without an old file, the mode follows the umask.

    Args:
        path: of the file, usually `*.safetensors`. A killed writer leaves a hidden `*.tmp` beside it, which the next
            one removes.
        caches: one for each layer: ours in any combination, mlx-lm's, or a `CacheList` of such.
        metadata: strings to be saved with them.
        tokens: the token ids that the caches have read.
        fingerprint: of the model, from `model_fingerprint`.
        format: the only one that is written; "mlx-lm" was another before 0.4.
        force: replace any regular file.

    Raises:
        ValueError: metadata other than strings, a cache of an unknown kind, another format, a folder that does not
            exist, or a path that is another kind of file, a folder, a device, a pipe or a socket.
        OSError: the file cannot be written.
    """
    check_type("path", path, str | os.PathLike, "give the name of a file")
    check_type("caches", caches, Sequence, "give a list of caches, as make_prompt_cache makes it")
    check_type(
        "fingerprint", fingerprint, str | None, "give that of mlx_kv.files.fingerprint.model_fingerprint, or None"
    )
    if format != "mlx-kv":
        raise ValueError(
            f"format is {format!r}, and only mlx-kv is written since 0.4: leave it out, or make files for mlx-lm with "
            "mlx_lm.cache_prompt"
        )
    check_output(path, force)
    pack(caches, metadata, tokens=tokens, fingerprint=fingerprint).write(path)


def check_output(path: str | Path, force: bool = False, fix: str = "force=True") -> None:
    """As `atomic_write.check_replaceable`, for prompt caches."""
    check_replaceable(path, is_prompt_cache, "prompt cache", force, fix)


def is_prompt_cache(path: str | Path) -> bool:
    """Whether a file has the metadata of a prompt cache of mlx-kv, of any version, or of mlx-lm; it may be damaged."""
    with open(path, "rb") as file:
        words = tensor_files.words_of(file, os.fstat(file.fileno()).st_size)
    return words is not None and (VERSION_WORD in words or stock_files.is_stock(words))


def _checked(metadata: Mapping[str, str] | None) -> dict[str, str]:
    check_type("metadata", metadata, Mapping | None, "give a dict of strings, or None")
    words = dict(metadata or {})
    if not all(isinstance(word, str) for pair in words.items() for word in pair):
        raise ValueError("metadata has a key or a value that is not text: convert it to str, for instance with json")
    return words


@dataclass(frozen=True)
class PackedCaches:
    """Caches as bytes, which any thread can write."""

    contents: dict[str, tensor_files.Content]
    description: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(len(content.bytes) for content in self.contents.values())

    def write(self, path: str | Path) -> None:
        """Raises ValueError and OSError as `tensor_files.write`."""
        digests = {name: content.digest(name) for name, content in self.contents.items()}
        text = json.dumps({**self.description, "arrays": digests})
        words = {VERSION_WORD: VERSION, "description": text, "checksum": _checksum(text)}
        tensor_files.write_contents(path, self.contents, words)


def pack(
    caches: Sequence[Any],
    metadata: Mapping[str, str] | None = None,
    *,
    tokens: Sequence[int] | None = None,
    fingerprint: str | None = None,
) -> PackedCaches:
    """The bytes that `save_prompt_cache` writes: the live slots of caches, as they are now.

    Raises:
        ValueError: metadata other than strings, or a cache of an unknown kind.
    """
    arrays: dict[str, mx.array] = {}
    described = [describe(cache, str(index), arrays) for index, cache in enumerate(caches)]
    if tokens is not None:
        arrays["tokens"] = mx.array(token_ids(tokens, what="tokens"), dtype=mx.int32)
    description = {"caches": described, "metadata": _checked(metadata), "fingerprint": fingerprint}
    return PackedCaches(tensor_files.contents(arrays), description)


def load_prompt_cache(path: str | Path, return_metadata: bool = False) -> Any:
    """The caches of a file that `save_prompt_cache` wrote, or mlx-lm 0.32.2's function of this name.

    They continue as the saved ones would have, with the same capacity (or one growth more, if there was no slot left).
    Caches of mlx-lm become ours.

    Returns:
        A list of caches, one for each layer; with return_metadata also the metadata that was saved with them.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is another kind of file, of another version, or damaged; or it has a budget whose score is not
            registered in this process.
    """
    check_type("path", path, str | os.PathLike, "give the name of a file")
    file = load_prompt_file(path)
    return (file.caches, file.metadata) if return_metadata else file.caches


def load_prompt_file(path: str | Path) -> PromptFile:
    """As `load_prompt_cache`, with all contents of the file."""
    return read(path).restore()


@dataclass(frozen=True)
class ReadFile:
    """A file that was read and whose checksums are right, its caches still bytes."""

    path: str | Path
    file: tensor_files.TensorFile
    description: Description | None  # None: mlx-lm wrote it

    def restore(self) -> PromptFile:
        """Makes the caches.

        Raises:
            ValueError: a description that is not valid, or with a score or a codec that is not registered.
        """
        if self.description is None:
            caches, metadata = stock_files.convert(self.path, self.file)
            return PromptFile(caches, metadata, stock=True)
        if self.description.blocks is not UNSET:
            raise ValueError(
                f"{self.path} is a part of an entry of a prompt store, whose blocks are beside it: give the folder to "
                "mlx_kv.PromptStore"
            )
        arrays = dict(self.file.arrays)
        try:
            tokens = arrays.pop("tokens", None)
            check_shape(tokens, "n", {}, mx.int32)
            with _one_file:
                caches = restore(self.description.caches, arrays)
        except ValueError as error:
            raise ValueError(f"{self.path} cannot be used: {error}; make it again") from error
        ids: Any = None if tokens is None else tokens.tolist()
        return PromptFile(caches, self.description.metadata, ids, self.description.fingerprint)


def read(path: str | Path) -> ReadFile:
    """Reads a file, in any thread.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is another kind of file, of another version, or damaged.
    """
    file = tensor_files.read(path)
    words = file.words
    if VERSION_WORD not in words:
        return ReadFile(path, file, None)
    if words[VERSION_WORD] != VERSION:
        raise ValueError(
            f"{path} is a prompt cache of version {words[VERSION_WORD][:20]!r}, but this mlx-kv reads version "
            f"{VERSION}: make it again"
        )
    text = words.get("description", "")
    if words.get("checksum") != _checksum(text):
        raise ValueError(f"{path} was damaged: its description is not what was written; make it again")
    try:
        description = decode(read_json(text), Description)
    except ValueError as error:
        raise ValueError(f"{path} was damaged: its description is not valid ({error}); make it again") from error
    if description.arrays != file.digests:
        raise ValueError(f"{path} was damaged: its arrays are not what was written; make it again")
    return ReadFile(path, file, description)


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
