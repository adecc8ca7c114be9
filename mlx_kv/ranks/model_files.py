"""Whether ranks have the same model: a short text for files, cheap to make even of large ones.

Decides what is compared. Knows nothing about what is in the files, nor who compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

SAMPLE = 2**16  # bytes, three times; smaller files as a whole
KINDS = {".json", ".safetensors", ".jinja", ".txt", ".model"}  # what mlx-lm reads of a model


def marks_of(files: Iterable[Path]) -> str:
    """16 hex digits that tell models apart: of the names and sizes of their files, and of some of what is in each.

    Of large files the beginning counts, which in a file of weights names all of them, a part of the middle and the end.
    """
    seal = hashlib.blake2b(digest_size=8)
    for path in sorted(file for file in files if file.suffix in KINDS and file.is_file()):
        size = path.stat().st_size
        seal.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, size - SAMPLE) if size > 3 * SAMPLE else (0,):
                file.seek(start)
                seal.update(file.read(SAMPLE if size > 3 * SAMPLE else size))
    return seal.hexdigest()
