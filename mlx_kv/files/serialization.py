"""Prompt cache files: written, read and checked; cut into blocks for a store of prompts; fingerprints of models.

A file is a safetensors file whose metadata has a version, a description in JSON (`caches`) and its checksum; the
description has a digest of each array. Files of mlx-lm are read, too (`caches`).

In a store of prompts the slots of packed caches are cut into blocks, each of which becomes a file of its own. A block
is named by a digest of its contents, so the same slots have the same name in every process. Layers of one layout and
length are cut together: each block has some slots of all of their planes, keys and values. Slots after the last block
stay with the rest: the description, and arrays that hold no slots. Packing, cutting and joining work on bytes, in any
thread.
H KV heads, n slots.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx.utils import tree_flatten
from msgspec import UNSET

from mlx_kv.cache.checks import check_type, token_ids
from mlx_kv.cache.layout import PLACES
from mlx_kv.files import tensor_files
from mlx_kv.files.atomic_write import PRIVATE, check_replaceable
from mlx_kv.files.caches import BlockColumn, Description, convert, describe, is_stock, restore
from mlx_kv.files.tensor_files import check_shape, decode, read_json

__all__ = ["PromptFile", "load_prompt_cache", "load_prompt_file", "model_fingerprint", "save_prompt_cache"]

VERSION = "1"
VERSION_WORD = "mlx_kv_prompt_cache"  # in the metadata of each file
BLOCK_WORD, BLOCK_VERSION = "mlx_kv_prompt_block", "1"  # in the metadata of each block
BLOCK_SLOTS = 512
MIN_BLOCK_SLOTS = 64  # of a block: fewer are not worth a file
SAMPLE = 16  # values of each weight, three times
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
    so a private file stays private; without an old file, it is its owner's alone (0600).

    Args:
        path: of the file, usually `*.safetensors`. A killed writer leaves a hidden `*.tmp` beside it, which the next
            one removes.
        caches: one for each layer: ours in any combination, mlx-lm's, or a `CacheList` of such.
        metadata: strings to be saved with them.
        tokens: the token ids that the caches have read, also those of images.
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
        "fingerprint", fingerprint, str | None, "give that of mlx_kv.files.serialization.model_fingerprint, or None"
    )
    if not isinstance(format, str) or format != "mlx-kv":
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
    words = tensor_files.read_metadata(path)
    return words is not None and (VERSION_WORD in words or is_stock(words))


@dataclass(frozen=True)
class PackedCaches:
    """Caches as bytes, which any thread can write."""

    contents: dict[str, tensor_files.Content]
    description: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(len(content.bytes) for content in self.contents.values())

    def write(self, path: str | Path, mode: int = PRIVATE) -> None:
        """Writes the file, its owner's alone unless mode says more. Raises ValueError and OSError as `write`."""
        digests = {name: content.digest(name) for name, content in self.contents.items()}
        text = json.dumps({**self.description, "arrays": digests})
        words = {VERSION_WORD: VERSION, "description": text, "checksum": _checksum(text)}
        tensor_files.write_contents(path, self.contents, words, mode)


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
    check_type("metadata", metadata, Mapping | None, "give a dict of strings, or None")
    words = dict(metadata or {})
    if not all(isinstance(word, str) for pair in words.items() for word in pair):
        raise ValueError("metadata has a key or a value that is not text: convert it to str, for instance with json")
    arrays: dict[str, mx.array] = {}
    described = [describe(cache, str(index), arrays) for index, cache in enumerate(caches)]
    if tokens is not None:
        listed = token_ids(tokens, 2 * PLACES, "tokens")  # places of images are negative numbers in the file
        arrays["tokens"] = mx.array(np.array(listed, np.uint32).view(np.int32))
    description = {"caches": described, "metadata": words, "fingerprint": fingerprint}
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

    @property
    def columns(self) -> list[BlockColumn]:
        """The blocks that belong to a part of an entry of a prompt store."""
        return [] if self.description is None else self.description.blocks or []

    def restore(self) -> PromptFile:
        """Makes the caches.

        Raises:
            ValueError: a description that is not valid, or with a score or a codec that is not registered.
        """
        if self.description is None:
            caches, metadata = convert(self.path, self.file)
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
        ids: Any = None if tokens is None else np.array(tokens).view(np.uint32).tolist()
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


# --- blocks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotBlock:
    """Slots [first, last) of the planes of some layers.

    Args:
        wholes: the arrays that they are a part of, by name, each (H, n, width).
    """

    wholes: dict[str, tensor_files.Content]
    first: int
    last: int

    @property
    def slots(self) -> int:
        return self.last - self.first

    @property
    def contents(self) -> dict[str, tensor_files.Content]:
        """By the same names, each (H, slots, width); copied on each access."""
        return {name: _slots(whole, self.first, self.last) for name, whole in self.wholes.items()}

    @cached_property
    def name(self) -> str:
        """32 hex digits."""
        return _block_name({name: content.digest(name) for name, content in self.contents.items()})

    @property
    def nbytes(self) -> int:
        return sum(len(whole.bytes) // whole.shape[1] * self.slots for whole in self.wholes.values())

    def write(self, path: str | Path, mode: int = PRIVATE) -> None:
        """Raises ValueError and OSError as `tensor_files.write`."""
        tensor_files.write_contents(path, self.contents, {BLOCK_WORD: BLOCK_VERSION}, mode)


def _block_name(digests: Mapping[str, str]) -> str:
    text = " ".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_block(path: str | Path, name: str) -> tensor_files.TensorFile:
    """A block of this name.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: it is no block, has another name, or was damaged.
    """
    file = tensor_files.read(path)
    if file.words != {BLOCK_WORD: BLOCK_VERSION} or _block_name(file.digests) != name:
        raise ValueError(f"{path} was damaged: it is not what was written; make it again")
    return file


def _view(content: tensor_files.Content) -> np.ndarray:
    """The bytes of an array (H, n, width), as (H, n, bytes of a slot)."""
    heads, slots, width = content.shape
    return np.frombuffer(content.bytes, np.uint8).reshape(heads, slots, width * content.itemsize)


def _slots(content: tensor_files.Content, first: int, last: int) -> tensor_files.Content:
    """A copy of some slots of an array (H, n, width)."""
    part = np.ascontiguousarray(_view(content)[:, first:last])
    return tensor_files.Content(
        content.dtype, (content.shape[0], last - first, content.shape[2]), part.reshape(-1).data
    )


@dataclass(frozen=True)
class CutCaches:
    """Packed caches as blocks and the rest.

    Attributes:
        columns: of each layout, its blocks in the order of their slots.
    """

    rest: PackedCaches
    columns: list[list[SlotBlock]]


def block_ends(slots: int, wanted: Collection[int] = ()) -> list[int]:
    """Where the blocks of so many slots end: at every multiple of BLOCK_SLOTS, and at the wanted ends.

    A prompt shares blocks with an earlier one if it is cut at the same ends, as far as they have the same tokens.
    """
    ends, first = [], 0
    for end in sorted({*range(BLOCK_SLOTS, slots + 1, BLOCK_SLOTS), *wanted}):
        if end <= slots and end - first >= MIN_BLOCK_SLOTS:
            ends.append(end)
            first = end
    return ends


def cut_into_blocks(packed: PackedCaches, wanted: Callable[[int, int], Collection[int]]) -> CutCaches:
    """Cuts all slots into blocks, except for a short rest.

    Args:
        wanted: the other ends of blocks, by the number of the column and of its slots.
    """
    rest, columns, described = dict(packed.contents), [], []
    for number, (slots, names) in enumerate(_columns(packed.description["caches"]).items()):
        ends = block_ends(slots[0], wanted(number, slots[0]))
        wholes = {name: rest[name] for name in names}
        blocks = [SlotBlock(wholes, first, last) for first, last in pairwise([0, *ends])]
        if blocks:
            rest |= {name: _slots(whole, ends[-1], slots[0]) for name, whole in wholes.items()}
            described.append({"arrays": names, "blocks": [[block.name, block.slots] for block in blocks]})
        columns.append(blocks)
    description = {**packed.description, "blocks": described} if described else packed.description
    return CutCaches(replace(packed, contents=rest, description=description), columns)


def _columns(described: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], list[str]]:
    """The arrays that hold slots, by the number of slots and the layout."""
    columns: dict[tuple[Any, ...], list[str]] = {}
    for cache in _flat_caches(described):
        if len(cache["live"]) == 1:  # one sequence: what is kept of prompts
            names = [f"{cache['name']}.{which}.{i}.0" for which, count in cache["planes"].items() for i in range(count)]
            columns.setdefault((cache["live"][0], *cache["state"][2]), []).extend(names)
    return {column: names for column, names in columns.items() if names}


def _flat_caches(described: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for cache in described:
        if cache["kind"] == "list":
            yield from _flat_caches(cache["members"])
        elif cache["kind"] == "mlx-kv":
            yield cache


def block_names(rest: ReadFile) -> list[list[str]]:
    """The names of the blocks that go with a rest, by column."""
    return [[name for name, _ in column.blocks] for column in rest.columns]


def join_blocks(rest: ReadFile, read: Callable[[str], tensor_files.TensorFile]) -> ReadFile:
    """The file that would have been written in one piece.

    Args:
        read: reads the block of a name.

    Raises:
        ValueError: the blocks do not fit. Also anything that `read` raises.
    """
    contents = dict(rest.file.contents)
    for column in rest.columns:
        if any(name not in contents or len(contents[name].shape) != 3 for name in column.arrays):
            raise ValueError("its blocks are of arrays that it does not have")
        total = sum(slots for _, slots in column.blocks)
        tails = {name: contents[name] for name in column.arrays}
        wholes = {name: _with_space(tail, total) for name, tail in tails.items()}
        first = 0
        for block, slots in column.blocks:
            parts = read(block).contents
            if parts.keys() != wholes.keys():
                raise ValueError("a block of other layers")
            for name, part in parts.items():
                _put(part, wholes[name], first, slots)
            first += slots
        for name, tail in tails.items():
            _put(tail, wholes[name], first, tail.shape[1])
        contents |= wholes
    description = rest.description and msgspec.structs.replace(rest.description, blocks=UNSET)
    return replace(rest, file=replace(rest.file, contents=contents), description=description)


def _with_space(tail: tensor_files.Content, slots: int) -> tensor_files.Content:
    """An array with space for so many slots in front of those of the tail (H, n, width)."""
    heads, more, width = tail.shape
    whole = np.empty(heads * (slots + more) * width * tail.itemsize, np.uint8)
    return tensor_files.Content(tail.dtype, (heads, slots + more, width), whole.data)


def _put(part: tensor_files.Content, whole: tensor_files.Content, first: int, slots: int) -> None:
    """Copies all slots of a part into the whole."""
    if (part.dtype, part.shape) != (whole.dtype, (whole.shape[0], slots, whole.shape[2])):
        raise ValueError("a block of other shapes")
    _view(whole)[:, first : first + slots] = _view(part)


# --- fingerprints -----------------------------------------------------------------------------------------------------


def model_fingerprint(model: nn.Module, tokenizer: Any = None) -> str:
    """32 hex digits that identify a model, and as many for the tokenizer if one is given.

    A digest of the model's class, its configuration, and the names, shapes and dtypes of its weights with 48 values of
    each; and of the tokenizer's vocabulary. Models that differ only in other values have the same fingerprint.
    """
    weights: list[Any] = sorted(tree_flatten(model.parameters()))  # type: ignore[no-untyped-call]
    samples = []
    for _, weight in weights:
        flat, middle = weight.reshape(-1), weight.size // 2
        parts = [flat[:SAMPLE], flat[middle : middle + SAMPLE], flat[-SAMPLE:]]
        samples.append(mx.concatenate(parts).view(mx.uint8))
    mx.eval(samples)
    args: Any = getattr(model, "args", None)
    settings = asdict(args) if is_dataclass(args) and not isinstance(args, type) else {}
    configuration = json.dumps(settings, sort_keys=True, default=lambda unknown: type(unknown).__name__)
    digest = hashlib.blake2b(f"{type(model).__module__} {configuration} ".encode(), digest_size=16)
    for (name, weight), sample in zip(weights, samples, strict=True):
        digest.update(f"{name} {weight.shape} {weight.dtype} ".encode())
        digest.update(bytes(sample.tolist()))  # type: ignore[arg-type]
    if tokenizer is None:
        return digest.hexdigest()
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return f"{digest.hexdigest()}-{hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()}"


def check_fingerprint(what: str, saved: str | None, own: str, made_with: str | None = None) -> None:
    """Refuses caches of another model or, if both fingerprints include a tokenizer, of another tokenizer.

    Args:
        what: the name of the file, for the message.
        saved, own: the fingerprints of the file and of the model that is to continue from it.
        made_with: the name of the model that the file was made with, for the message.

    Raises:
        ValueError: they differ, or the file has none.
    """
    if saved is None:
        raise ValueError(f"{what} has no fingerprint of a model: make it again with mlx-kv cache")
    fix = "make it again" + (f", or give the model that it was made with, {made_with}" if made_with else "")
    (model, _, tokenizer), (own_model, _, own_tokenizer) = saved.partition("-"), own.partition("-")
    if model != own_model:
        raise ValueError(f"{what} is a prompt cache of another model: {fix}")
    if tokenizer and own_tokenizer and tokenizer != own_tokenizer:
        raise ValueError(f"{what} is a prompt cache of a model with another tokenizer: {fix}")
