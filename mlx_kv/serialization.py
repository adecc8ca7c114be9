"""Prompt caches in files: what is written of each cache, and when a file is not taken for what it says it is.

Decides which slots of a cache are worth writing (those that hold tokens), and what else makes a loaded cache go on as
the saved one would have: rows, settings, capacity, the growth rule, what an evictor knows. A file is a safetensors file
whose metadata has a version, a description in JSON, and a checksum of that; the description has a digest of each array.
Knows nothing about bytes on a disk (`tensor_files`), mlx-lm's own format (`stock_files`) or models (`fingerprint`).
B rows, H KV heads, n live slots of one row.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models import cache as stock

from mlx_kv import stock_files, tensor_files
from mlx_kv.cache import KVCache
from mlx_kv.fingerprint import model_fingerprint
from mlx_kv.growth import FixedStep, Geometric, Growth, round_up
from mlx_kv.layout import make_layout
from mlx_kv.replacing import check_replaceable

__all__ = ["PromptFile", "load_prompt_cache", "load_prompt_file", "model_fingerprint", "save_prompt_cache"]

VERSION = "1"
VERSION_WORD = "mlx_kv_prompt_cache"  # its presence says that a file is one of these
GROWTHS: dict[str, type[Geometric] | type[FixedStep]] = {"geometric": Geometric, "fixed_step": FixedStep}
# What mlx-lm keeps itself, stored as it is: recurrent state, and caches that were never made ours.
AS_THEY_ARE = (
    stock.ArraysCache,
    stock.KVCache,
    stock.QuantizedKVCache,
    stock.RotatingKVCache,
    stock.ChunkedKVCache,
    stock.ConcatenateKVCache,
)
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
    check_output(path, force)
    if format == "mlx-lm":
        if tokens is not None or fingerprint is not None:
            raise ValueError("mlx-lm's format has no place for tokens or a fingerprint: leave them out")
        stock_files.save(path, caches, _checked(metadata))
        return
    if format != "mlx-kv":
        raise ValueError(f"format is {format!r}: choose mlx-kv or mlx-lm")
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
    described = [_describe(cache, str(index), arrays) for index, cache in enumerate(caches)]
    if tokens is not None:
        arrays["tokens"] = mx.array([int(token) for token in tokens], dtype=mx.int32)
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
        arrays = dict(self.file.arrays)
        tokens: Any = arrays["tokens"].tolist() if "tokens" in arrays else None
        with _one_file:
            caches = [_restore(described, arrays) for described in self.description["caches"]]
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
    description = json.loads(text)
    if description["arrays"] != file.digests:
        raise ValueError(f"{path} was damaged: its arrays are not what was written; make it again")
    return ReadFile(path, file, description)


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


# --- one cache --------------------------------------------------------------------------------------------------------


def _describe(cache: Any, name: str, arrays: dict[str, mx.array]) -> dict[str, Any]:
    """A cache in JSON; its arrays go to `arrays`, under names that begin with `name`."""
    if isinstance(cache, KVCache):
        return _describe_ours(cache, name, arrays)
    if type(cache) is stock.CacheList:
        members = [_describe(member, f"{name}.{index}", arrays) for index, member in enumerate(cache.caches)]
        return {"kind": "list", "members": members}
    if type(cache) in AS_THEY_ARE:
        return {"kind": type(cache).__name__, "state": _in_json(cache.state, name, arrays)}
    raise ValueError(f"cache {name} is a {type(cache).__name__}, which no file can hold: use mlx_kv.make_prompt_cache")


def _restore(described: dict[str, Any], arrays: dict[str, mx.array]) -> Any:
    """The cache that was described."""
    kind = described["kind"]
    if kind == "mlx-kv":
        return _restore_ours(described, arrays)
    if kind == "list":
        members = [_restore(member, arrays) for member in described["members"]]
        return stock.CacheList(*members)  # type: ignore[no-untyped-call]
    made: Any = next(cls for cls in AS_THEY_ARE if cls.__name__ == kind)
    return made.from_state(_from_json(described["state"], arrays))


def _describe_ours(cache: KVCache, name: str, arrays: dict[str, mx.array]) -> dict[str, Any]:
    keys, values, *state = cache.state
    live = [min(max(0, row.end), cache.layout.most_slots) for row in cache._rows]
    planes = {}
    for which, tensor in (("keys", keys), ("values", values)):
        for index, plane in enumerate(tensor or ()):  # (B, H, C, width)
            for row, used in enumerate(live):
                arrays[f"{name}.{which}.{index}.{row}"] = plane[row, :, :used]  # (H, n, width)
        planes[which] = len(tensor or ())
    return {
        "kind": "mlx-kv",
        "name": name,
        "planes": planes,
        "live": live,
        "capacity": cache.capacity,
        "state": _in_json(state, f"{name}.state", arrays),
        "growth": _growth_in_json(cache._growth),
        "reserve": cache._reserve,
        "announced": cache._announced,
        "lengths": cache._lengths,
    }


def _restore_ours(described: dict[str, Any], arrays: dict[str, mx.array]) -> KVCache:
    name, live, capacity = described["name"], described["live"], described["capacity"]
    cache = KVCache()
    rule = described["growth"]
    if rule is not None:
        cache._growth = GROWTHS[rule["rule"]](**rule["settings"])
    cache._reserve = described["reserve"]
    state = _rows, _ranges, layout, *_settings = _from_json(described["state"], arrays)
    needed = min(max(live) + 1, make_layout(*layout).most_slots)
    if needed > capacity:
        capacity = round_up(max(needed, cache._growth.capacity(needed, capacity)))

    def plane(which: str, index: int) -> mx.array:
        lines = [arrays.pop(f"{name}.{which}.{index}.{row}") for row in range(len(live))]  # each (H, n, width)
        whole = mx.zeros((len(lines), lines[0].shape[0], capacity, lines[0].shape[2]), lines[0].dtype)
        for row, line in enumerate(lines):
            whole[row, :, : line.shape[1]] = line
        mx.eval(whole)
        return whole

    keys, values = ([plane(which, i) for i in range(count)] or None for which, count in described["planes"].items())
    cache.state = keys, values, *state
    cache._announced = tuple(described.get("announced", [0] * len(live)))  # version 0.1.0 did not say
    cache._lengths = None if described["lengths"] is None else tuple(described["lengths"])
    return cache


def _growth_in_json(growth: Growth) -> dict[str, Any] | None:
    """A rule of ours by its name; for another, the loaded cache has the default."""
    for name, rule in GROWTHS.items():
        if type(growth) is rule:
            return {"rule": name, "settings": asdict(growth)}
    return None


def _in_json(tree: Any, name: str, arrays: dict[str, mx.array]) -> Any:
    """Lists and scalars as they are; an array goes to `arrays`, and its name stays in its place."""
    if isinstance(tree, mx.array):
        arrays[name] = tree
        return {"array": name}
    if isinstance(tree, (list, tuple)):
        return [_in_json(item, f"{name}.{index}", arrays) for index, item in enumerate(tree)]
    return tree


def _from_json(tree: Any, arrays: dict[str, mx.array]) -> Any:
    if isinstance(tree, dict):
        return arrays[tree["array"]]
    if isinstance(tree, list):
        return [_from_json(item, arrays) for item in tree]
    return tree
