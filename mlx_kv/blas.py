"""A tuned BLAS for MLX on a Linux CPU, in the place of the slow reference BLAS that its wheel brings.

Decides which library to load, and loads it before MLX: its symbols then win. It must therefore import nothing that
imports MLX. Elsewhere (macOS, or MLX already loaded) it does nothing and says so.

    from mlx_kv import blas
    print(blas.preload())  # before anything imports mlx

The environment variable MLX_KV_BLAS names a library to load instead, or `none`.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import os
import sys
from collections.abc import Iterator

SYSTEM_LIBRARIES = ("mkl_rt", "openblas", "blis")
_loaded: str | None = None


def _candidates() -> Iterator[str]:
    """Libraries to try, best first: the `mkl` package of the [cpu] extra, then what the system has."""
    try:
        files = importlib.metadata.files("mkl") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    yield from (os.path.realpath(file.locate()) for file in files if file.name.startswith("libmkl_rt.so"))
    yield from filter(None, map(ctypes.util.find_library, SYSTEM_LIBRARIES))


def preload() -> str:
    """Loads a tuned BLAS if there is one and it helps; returns in words what MLX will use."""
    global _loaded
    wanted = os.environ.get("MLX_KV_BLAS")
    if _loaded is not None:
        return _loaded
    if sys.platform != "linux":
        return "the system's own"
    if wanted == "none":
        return "MLX's bundled reference BLAS (MLX_KV_BLAS=none)"
    if "mlx.core" in sys.modules:
        return "MLX's bundled reference BLAS (MLX was imported before a better one could be loaded)"
    for library in [wanted] if wanted else _candidates():
        try:
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        _loaded = library
        return library
    reason = f"{wanted} cannot be loaded" if wanted else 'no better one found: pip install "mlx-kv[cpu]"'
    return f"MLX's bundled reference BLAS ({reason})"
