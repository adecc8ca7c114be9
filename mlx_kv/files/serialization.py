"""Prompt caches in files: what is written of each cache, and when a file is not taken for what it says it is.

Decides what a file is: a safetensors file whose metadata has a version, a description in JSON, and a checksum of that;
the description has a digest of each array. Whatever is not as it should be is a ValueError that names the file. Knows
nothing about bytes on a disk (`tensor_files`), what is written of one cache (`described`), mlx-lm's own format
(`stock_files`) or models (`fingerprint`).
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

from mlx_kv.cache.checks import check_type, token_ids
from mlx_kv.files import stock_files, tensor_files
from mlx_kv.files.described import NOT_SO, describe, restore
from mlx_kv.files.fingerprint import model_fingerprint
from mlx_kv.files.replacing import check_replaceable

__all__ = ["PromptFile", "load_prompt_cache", "load_prompt_file", "model_fingerprint", "save_prompt_cache"]

VERSION = "1"
VERSION_WORD = "mlx_kv_prompt_cache"  # its presence says that a file is one of these
_one_file = threading.Lock()  # layers of one sequence find each other in the order in which they are made


@dataclass(frozen=True)
class PromptFile:
    """What a file holds.

    Attributes:
        caches: one for each layer, ready to go on.
        metadata: the words that were saved with them.
        tokens: that the caches have read, where they were given.
        fingerprint: of the model, where it was given.
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
    format: Literal["mlx-kv", "mlx-lm"] = "mlx-kv",
    force: bool = False,
) -> None:
    """Writes the caches of a model to a file. Until it is there whole, and on the disk, an older one stays.

    Only a prompt cache is replaced, ours or mlx-lm's, or an empty file. The new one has its mode, so what was private
    stays so; else a file's mode is what the process gives to any (umask).

    Args:
        path: of the file, usually `*.safetensors`. A killed writer leaves a hidden `*.tmp` beside it, which the next
            one removes.
        caches: one for each layer: ours in any combination, mlx-lm's, or a `CacheList` of such.
        metadata: words to be kept with them.
        tokens: the token ids that the caches have read.
        fingerprint: of the model, from `model_fingerprint`.
        format: "mlx-lm" writes what mlx-lm 0.32.2 reads, where that can hold these caches: one sequence, full attention
            or rings, nothing evicted.
        force: replace any regular file.

    Raises:
        ValueError: metadata that is not words, a cache of an unknown kind or one that mlx-lm's format cannot hold, a
            folder that is not there, or a path that is somebody else's file, a folder, a device, a pipe or a socket.
        OSError: the file cannot be written.
    """
    check_type("path", path, str | os.PathLike, "give the name of a file")
    check_type("caches", caches, Sequence, "give a list of caches, as make_prompt_cache makes it")
    check_type(
        "fingerprint", fingerprint, str | None, "give that of mlx_kv.files.fingerprint.model_fingerprint, or None"
    )
    if not isinstance(format, str) or format not in ("mlx-kv", "mlx-lm"):
        raise ValueError(f"format is {format!r}: choose mlx-kv or mlx-lm")
    check_output(path, force)
    if format == "mlx-lm":
        if tokens is not None or fingerprint is not None:
            raise ValueError("mlx-lm's format has no place for tokens or a fingerprint: leave them out")
        stock_files.save(path, caches, _checked(metadata))
        return
    pack(caches, metadata, tokens=tokens, fingerprint=fingerprint).write(path)


def check_output(path: str | Path, force: bool = False, mend: str = "force=True") -> None:
    """As `replacing.check_replaceable`, for prompt caches."""
    check_replaceable(path, is_prompt_cache, "prompt cache", force, mend)


def is_prompt_cache(path: str | Path) -> bool:
    """Whether a file says that it is a prompt cache, of any version of ours or of mlx-lm's; it may be damaged."""
    with open(path, "rb") as file:
        words = tensor_files.words_of(file, os.fstat(file.fileno()).st_size)
    return words is not None and (VERSION_WORD in words or stock_files.is_stock(words))


def _checked(metadata: Mapping[str, str] | None) -> dict[str, str]:
    check_type("metadata", metadata, Mapping | None, "give words by name, or None")
    words = dict(metadata or {})
    if not all(isinstance(word, str) for pair in words.items() for word in pair):
        raise ValueError("metadata has a key or a value that is no text: convert it to str, for instance with json")
    return words


@dataclass(frozen=True)
class PackedCaches:
    """Caches as bytes: what is left to be done is the disk's, and any thread can do it."""

    contents: dict[str, tensor_files.Content]
    description: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(len(content.bytes) for content in self.contents.values())

    def write(self, path: str | Path) -> None:
        """Raises what `save_prompt_cache` raises of files."""
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
    """What `save_prompt_cache` writes: the live slots of caches, as they are now.

    Raises:
        ValueError: metadata that is not words, or a cache of an unknown kind.
    """
    arrays: dict[str, mx.array] = {}
    described = [describe(cache, str(index), arrays) for index, cache in enumerate(caches)]
    if tokens is not None:
        arrays["tokens"] = mx.array(token_ids(tokens, what="tokens"), dtype=mx.int32)
    description = {"caches": described, "metadata": _checked(metadata), "fingerprint": fingerprint}
    return PackedCaches(tensor_files.contents(arrays), description)


def load_prompt_cache(path: str | Path, return_metadata: bool = False) -> Any:
    """The caches of a file that `save_prompt_cache` wrote, or mlx-lm 0.32.2's function of this name.

    They go on as the saved ones would have, with the same capacity (or one growth more, if there was no slot left).
    What mlx-lm wrote becomes ours.

    Returns:
        A list of caches, one for each layer; with return_metadata also the words that were saved with them.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is another kind of file, of another version, or damaged; nothing of it is used then. Or it has a
            budget whose score nobody registered here.
    """
    check_type("path", path, str | os.PathLike, "give the name of a file")
    file = load_prompt_file(path)
    return (file.caches, file.metadata) if return_metadata else file.caches


def load_prompt_file(path: str | Path) -> PromptFile:
    """As `load_prompt_cache`, with all that the file holds."""
    return read(path).restore()


@dataclass(frozen=True)
class ReadFile:
    """A file that was read and found to be what was written, its caches still bytes."""

    path: str | Path
    file: tensor_files.TensorFile
    description: dict[str, Any] | None  # None: mlx-lm wrote it

    def restore(self) -> PromptFile:
        """Makes the caches.

        Raises:
            ValueError: caches that cannot be made here: of a budget whose score nobody registered, or not mlx-lm's.
        """
        if self.description is None:
            caches, metadata = stock_files.convert(self.path, self.file)
            return PromptFile(caches, metadata, stock=True)
        if "blocks" in self.description:
            raise ValueError(
                f"{self.path} is a part of an entry of a prompt store, whose blocks lie beside it: give the folder to "
                "mlx_kv.PromptStore"
            )
        arrays = dict(self.file.arrays)
        try:
            tokens = _tokens(arrays.pop("tokens", None))
            with _one_file:
                caches = restore(self.description["caches"], arrays)
        except NOT_SO as error:
            why = str(error).splitlines()[0] if isinstance(error, ValueError) and str(error) else "it is no cache"
            raise ValueError(f"{self.path} cannot be used: {why}; make it again") from error
        return PromptFile(caches, self.description["metadata"], tokens, self.description["fingerprint"])


def read(path: str | Path) -> ReadFile:
    """Reads a file, in any thread.

    Raises:
        FileNotFoundError, ValueError: as `load_prompt_cache`, of files.
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
        description = json.loads(text)
        _check_description(description)
    except NOT_SO as error:
        raise ValueError(f"{path} was damaged: its description is none; make it again") from error
    if description["arrays"] != file.digests:
        raise ValueError(f"{path} was damaged: its arrays are not what was written; make it again")
    return ReadFile(path, file, description)


def _check_description(told: Any) -> None:
    """Raises ValueError, TypeError or AttributeError."""
    words = [*told["metadata"], *told["metadata"].values(), "" if told["fingerprint"] is None else told["fingerprint"]]
    parts = told.keys() - {"blocks"}  # which only entries of a store have
    if parts != {"caches", "metadata", "fingerprint", "arrays"} or type(told["caches"]) is not list:
        raise ValueError("other parts")
    if not all(type(word) is str for word in words):
        raise ValueError("words that are none")


def _tokens(array: mx.array | None) -> list[int] | None:
    if array is None:
        return None
    if array.dtype != mx.int32 or array.ndim != 1:
        raise ValueError("its tokens are none")
    tokens: Any = array.tolist()
    return tokens  # type: ignore[no-any-return]


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
