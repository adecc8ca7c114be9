"""Folders, with what is in their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_kv import PromptStore


class Place:
    """A folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def put(self, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)

    def names(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def delete(self, name: str) -> None:
        (self.folder / name).unlink()

    def store(self, **options: Any) -> PromptStore:
        return PromptStore(self.folder, **{"fingerprint": "a", **options})

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
