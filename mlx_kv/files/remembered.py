"""Numbers that took long to measure, in one small file of the user's cache folder.

Decides where that is, what such a file looks like, and that whoever else's file lies there is left alone. What cannot
be remembered is measured again: nothing here fails for a disk. Knows nothing about what the numbers mean.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_kv.files.replacing import check_replaceable, regular, replacing
from mlx_kv.files.strict_json import read_json

FORMAT = "mlx-kv measurements 1"
FILE = "measurements.json"
MOST_BYTES = 2**20  # of a file that is read: ours are far smaller
MOST_SUBJECTS = 256  # those that were first go first

Measured = dict[str, dict[str, list[float]]]  # subject -> name -> numbers


def cache_folder() -> Path | None:
    """Where this user's programs keep what they can make again; None where nobody says. It may not be there yet.

    $XDG_CACHE_HOME/mlx-kv if that is an absolute path, as its specification wants it, else ~/.cache/mlx-kv.
    """
    told = os.environ.get("XDG_CACHE_HOME", "")
    folder = told if os.path.isabs(told) else os.path.expanduser("~/.cache")
    return Path(folder) / "mlx-kv" if os.path.isabs(folder) else None


class Remembered:
    """Numbers by subject and name; whoever writes last has written all that was there when it began to.

    Args:
        path: of the file; None is `FILE` in the `cache_folder`.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        folder = cache_folder()
        self.path = Path(path) if path is not None else folder / FILE if folder is not None else None

    def numbers(self, subject: str, name: str) -> list[float] | None:
        """What was measured; None if nobody did, or no file says so."""
        return self._read().get(subject, {}).get(name)

    def remember(self, subject: str, name: str, numbers: Sequence[float]) -> bool:
        """Whether they are in the file now: not if one is not finite, or the file is not ours or cannot be written."""
        if self.path is None or not all(map(math.isfinite, numbers)):
            return False
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_replaceable(self.path, is_ours, "file of measurements")
            measured = self._read()
            measured.setdefault(subject, {})[name] = list(numbers)
            for oldest in list(measured)[:-MOST_SUBJECTS]:
                del measured[oldest]
            with replacing(self.path) as file:
                file.write(json.dumps({"format": FORMAT, "measured": measured}, indent=1).encode() + b"\n")
        except (OSError, ValueError):
            return False
        return True

    def _read(self) -> Measured:
        if self.path is None:
            return {}
        try:
            return measured_in(self.path)
        except (OSError, ValueError):
            return {}


def is_ours(path: Path) -> bool:
    """Whether a file is what `Remembered` writes."""
    try:
        measured_in(path)
    except (OSError, ValueError):
        return False
    return True


def measured_in(path: Path) -> Measured:
    """The numbers of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is another's.
    """
    if regular(path).st_size > MOST_BYTES:
        raise ValueError(f"{path} is larger than any file of measurements")
    told: Any = read_json(path.read_bytes())
    if not isinstance(told, dict) or told.keys() != {"format", "measured"} or told["format"] != FORMAT:
        raise ValueError(f"{path} is no file of measurements")
    measured = told["measured"]
    if not isinstance(measured, dict) or not all(map(_are_numbers, measured.values())):
        raise ValueError(f"{path} is no file of measurements: it has other things than numbers")
    return measured


def _are_numbers(named: Any) -> bool:
    return isinstance(named, dict) and all(
        isinstance(numbers, list) and all(type(number) in (int, float) for number in numbers)
        for numbers in named.values()
    )
