"""Folders on a disk and elsewhere, with what is in their files."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import fsspec

from mlx_kv import PromptStore


class Place:
    """A folder, wherever it is."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.fs, self.root = fsspec.core.url_to_fs(url)

    def put(self, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            self.fs.makedirs(f"{self.root}/{name}".rsplit("/", 1)[0], exist_ok=True)
            self.fs.pipe_file(f"{self.root}/{name}", content)

    def names(self, folder: str = "") -> set[str]:
        self.fs.invalidate_cache()
        found = self.fs.find(f"{self.root}/{folder}")
        return {path.removeprefix(f"{self.root}/") for path in found}

    def read(self, name: str) -> bytes:
        content: bytes = self.fs.cat_file(f"{self.root}/{name}")
        return content

    def delete(self, name: str) -> None:
        self.fs.rm_file(f"{self.root}/{name}")

    def store(self, **options: Any) -> PromptStore:
        return PromptStore(self.url, **{"fingerprint": "a", **options})

    # --- blocks ---------------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> set[str]:
        """That are there, by their digests."""
        return {name.removesuffix(".block") for name in self.names() if name.endswith(".block") and "/" not in name}

    @property
    def held(self) -> set[str]:
        """The blocks that any index names."""
        told = [json.loads(self.read(name)).get("blocks", []) for name in self.names() if name.endswith(".json")]
        return {block for columns in told for column in columns for block, _, _ in column}

    @property
    def array_bytes(self) -> int:
        """Of all blocks and all entries, by their files."""
        total = 0
        for name in self.names():
            if name.endswith((".block", ".safetensors")):
                content = self.read(name)
                total += len(content) - 8 - int.from_bytes(content[:8], "little")
        return total


def new_place(where: str, tmp_path: Path) -> Place:
    """Of the tests' own; where: folder or memory."""
    return Place(str(tmp_path / uuid.uuid4().hex) if where == "folder" else f"memory://{uuid.uuid4().hex}")
