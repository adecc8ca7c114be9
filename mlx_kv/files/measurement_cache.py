"""A small file of measured numbers in the user's cache folder. A measurement that cannot be stored is made again."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from mlx_kv.files.atomic_write import atomic_write, check_replaceable, regular_file
from mlx_kv.files.decoding import read_json

FORMAT = "mlx-kv measurements 1"
FILE = "measurements.json"
MAX_BYTES = 2**20  # of a file that is read: ours are far smaller
MAX_SUBJECTS = 256  # the oldest are removed first

Measured = dict[str, dict[str, list[float]]]  # subject -> name -> numbers


class MeasurementFile(msgspec.Struct, forbid_unknown_fields=True):
    """The file, as JSON."""

    format: Literal["mlx-kv measurements 1"]
    measured: Measured


def cache_folder() -> Path | None:
    """The folder of this user for data that can be made again; it may not exist yet. None without a home directory.

    $XDG_CACHE_HOME/mlx-kv if that is an absolute path, as its specification demands, else ~/.cache/mlx-kv.
    """
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    folder = xdg if os.path.isabs(xdg) else os.path.expanduser("~/.cache")
    return Path(folder) / "mlx-kv" if os.path.isabs(folder) else None


class MeasurementCache:
    """Numbers by subject and name. Of two processes that write at the same time, the later one's file stays.

    Args:
        path: of the file; None is `FILE` in the `cache_folder`.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        folder = cache_folder()
        self.path = Path(path) if path is not None else folder / FILE if folder is not None else None

    def numbers(self, subject: str, name: str) -> list[float] | None:
        """The stored measurement, or None."""
        return self._read().get(subject, {}).get(name)

    def remember(self, subject: str, name: str, numbers: Sequence[float]) -> bool:
        """Stores a measurement.

        Returns:
            Whether it is in the file now. It is not if a number is not finite, or if the file is of another kind or
            cannot be written.
        """
        if self.path is None or not all(map(math.isfinite, numbers)):
            return False
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_replaceable(self.path, is_measurement_file, "file of measurements")
            measured = self._read()
            measured.setdefault(subject, {})[name] = list(numbers)
            for oldest in list(measured)[:-MAX_SUBJECTS]:
                del measured[oldest]
            with atomic_write(self.path) as file:
                file.write(json.dumps({"format": FORMAT, "measured": measured}, indent=1).encode() + b"\n")
        except (OSError, ValueError):
            return False
        return True

    def _read(self) -> Measured:
        if self.path is None:
            return {}
        try:
            return read_measurements(self.path)
        except (OSError, ValueError):
            return {}


def is_measurement_file(path: Path) -> bool:
    """Whether a file has the format that `MeasurementCache` writes."""
    try:
        read_measurements(path)
    except (OSError, ValueError):
        return False
    return True


def read_measurements(path: Path) -> Measured:
    """The numbers in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it has another format.
    """
    if regular_file(path).st_size > MAX_BYTES:
        raise ValueError(f"{path} is larger than any file of measurements: remove it")
    try:
        return msgspec.convert(read_json(path.read_bytes()), MeasurementFile).measured
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is not a file of measurements ({error}): remove it") from error
