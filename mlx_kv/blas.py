"""A tuned BLAS for MLX on a Linux CPU, in the place of the slow reference BLAS that its wheel brings.

Decides which library to load, and loads it before MLX: its symbols then win. So importing the package does it, before
anything else, and this file imports nothing that imports MLX. Where MLX came first it is too late: then that is said,
if it costs anything.

    import mlx_kv  # before anything that imports mlx
    print(mlx_kv.blas.preload())  # what MLX multiplies with

The environment variable MLX_KV_BLAS names a library to load instead, or `none`. One that is in the process already, as
LD_PRELOAD brings it, comes before it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

SYSTEM_LIBRARIES = ("mkl_rt", "openblas", "blis")
REFERENCE = "MLX's bundled reference BLAS"
PRODUCT = "cblas_sgemm"  # what MLX calls for a product of float32 matrices


def _candidates() -> Iterator[str]:
    """Libraries to try, best first: the `mkl` package of the [cpu] extra, then what the system has."""
    import importlib.metadata

    try:
        files = importlib.metadata.files("mkl") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    yield from (os.path.realpath(file.locate()) for file in files if file.name.startswith("libmkl_rt.so"))
    import ctypes.util  # it brings subprocess: only where it is needed

    yield from filter(None, map(ctypes.util.find_library, SYSTEM_LIBRARIES))


class _Symbol(ctypes.Structure):
    """What dladdr(3) says of an address."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _in_place() -> str | None:
    """The library whose products MLX gets, if one is loaded for all of the process: by LD_PRELOAD, or by us.

    MLX's own is not, as Python keeps the libraries of a module to that module.
    """
    process, found = ctypes.CDLL(None), _Symbol()
    try:
        product = ctypes.cast(getattr(process, PRODUCT), ctypes.c_void_p)
    except AttributeError:
        return None
    known = process.dladdr(product, ctypes.byref(found)) and found.file
    return os.fsdecode(known) if known else PRODUCT


def _load(libraries: Iterator[str] | list[str]) -> str | None:
    """Loads the first that can be loaded and multiplies."""
    for library in libraries:
        try:
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if _in_place() is not None:
            return library
    return None


@functools.cache
def preload() -> str:
    """Loads a tuned BLAS if there is one and it helps; returns in words what MLX will use.

    The first call, which importing the package makes, does the work and warns (RuntimeWarning) of what slows MLX down:
    an MLX_KV_BLAS that cannot be used, or an MLX on a CPU that was imported before. All others only say it again.
    """
    wanted = os.environ.get("MLX_KV_BLAS")
    if sys.platform != "linux":
        return "the system's own"
    if (library := _in_place()) is not None:  # LD_PRELOAD has brought it, and it wins
        return library
    if wanted == "none":
        return f"{REFERENCE} (MLX_KV_BLAS=none)"
    candidates = iter([wanted]) if wanted else _candidates()
    if (mlx := sys.modules.get("mlx.core")) is not None:
        _say_too_late(mlx, next(candidates, None))
        return f"{REFERENCE} (MLX was imported before a better one could be loaded)"
    if (library := _load(candidates)) is not None:
        return library
    if wanted:
        # Not attributed to a line of the caller: the user has set the variable. The command reports it, too.
        said = f"MLX_KV_BLAS={wanted} cannot be loaded, or is no BLAS: give the path of one, none, or leave it out"
        warnings.warn_explicit(said, RuntimeWarning, __package__, 0)
    reason = f"{wanted} cannot be loaded" if wanted else 'no better one found: install the extra "cpu"'
    return f"{REFERENCE} ({reason})"


def _say_too_late(mlx: Any, better: str | None) -> None:
    """One warning, where a better BLAS would have been used: not on a GPU, not where there is none."""
    if better is None or mlx.default_device().type != mlx.DeviceType.cpu:
        return
    said = (
        f"mlx was imported before mlx_kv: its products run on a reference BLAS, many times slower than {better}. "
        f"Import mlx_kv first, or start with LD_PRELOAD={better}; MLX_KV_BLAS=none keeps it so and this quiet"
    )
    warnings.warn(said, RuntimeWarning, stacklevel=4)  # this, preload, the package: then who imported it
