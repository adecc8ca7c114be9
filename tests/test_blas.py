"""Importing the package loads a tuned BLAS ahead of MLX; where it comes too late, or cannot, that is said once.

Each case is a process of its own: what is loaded cannot be unloaded. MLX's own reference BLAS stands in for a tuned
one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

LIBRARIES = sorted(Path(mx.__file__).parent.parent.glob("mlx_cpu.libs/libblas*.so*"))
pytestmark = pytest.mark.skipif(sys.platform != "linux" or not LIBRARIES, reason="MLX has a BLAS of its own on Linux")
LIBRARY = str(LIBRARIES[0]) if LIBRARIES else ""
SAY = "print(mlx_kv.blas.preload())\n"
NOT_THERE = """
import ctypes.util, importlib.metadata
def files(name): raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.files = files
ctypes.util.find_library = lambda name: None
"""
ON_A_GPU = """
import sys, types
class DeviceType: cpu, gpu = 0, 1
device = types.SimpleNamespace(type=DeviceType.gpu)
sys.modules["mlx.core"] = types.SimpleNamespace(default_device=lambda: device, DeviceType=DeviceType)
"""


def run(folder: Path, code: str, **environment: str) -> tuple[str, list[str]]:
    """What a program prints, and the lines of its stderr."""
    kept = {name: value for name, value in os.environ.items() if name not in ("MLX_KV_BLAS", "LD_PRELOAD")}
    (folder / "program.py").write_text(code)
    done = subprocess.run(
        [sys.executable, str(folder / "program.py")],
        capture_output=True,
        text=True,
        env={**kept, "PYTHONWARNINGS": "default::RuntimeWarning", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.splitlines()


def test_importing_the_package_loads_it_ahead_of_mlx(tmp_path: Path) -> None:
    first = "import sys, mlx_kv\nassert 'mlx.core' not in sys.modules\nimport mlx.core\n"
    assert run(tmp_path, first + SAY, MLX_KV_BLAS=LIBRARY) == (LIBRARY, [])
    bound = "import ctypes, mlx_kv\nprint(bool(ctypes.CDLL(None).cblas_sgemm))"  # so MLX will find it
    assert run(tmp_path, bound, MLX_KV_BLAS=LIBRARY) == ("True", [])
    inner = "from mlx_kv.cache.kv_cache import KVCache\nimport mlx_kv\n"
    assert run(tmp_path, inner + SAY, MLX_KV_BLAS=LIBRARY) == (LIBRARY, [])


def test_after_mlx_it_is_said_once_where_and_how(tmp_path: Path) -> None:
    code = f"import mlx.core\nimport mlx_kv\n{SAY}{SAY}import importlib\nimportlib.reload(mlx_kv)\nmlx_kv.KVCache\n"
    out, err = run(tmp_path, code, MLX_KV_BLAS=LIBRARY)
    assert (
        out.splitlines() == ["MLX's bundled reference BLAS (MLX was imported before a better one could be loaded)"] * 2
    )
    assert [line for line in err if "Warning" in line] == err[:1]
    assert "program.py:2: RuntimeWarning: mlx was imported before mlx_kv" in err[0]
    for mend in ("Import mlx_kv first", f"LD_PRELOAD={LIBRARY}", "MLX_KV_BLAS=none"):
        assert mend in err[0]
    assert err[1:] == ["  import mlx_kv"]


@pytest.mark.parametrize(
    ("before", "environment"),
    [
        ("import mlx.core\n", {"MLX_KV_BLAS": "none"}),
        ("import mlx.core\n", {"LD_PRELOAD": LIBRARY}),
        (ON_A_GPU, {"MLX_KV_BLAS": LIBRARY}),
        (NOT_THERE + "import mlx.core\n", {}),
        (NOT_THERE, {}),
    ],
    ids=["none", "preloaded", "on a GPU", "nothing better", "nothing better, first"],
)
def test_where_nothing_is_lost_nothing_is_said(before: str, environment: dict[str, str], tmp_path: Path) -> None:
    out, err = run(tmp_path, before + "import mlx_kv\n" + SAY, **environment)
    assert err == []
    assert (out == LIBRARY) == ("LD_PRELOAD" in environment)


@pytest.mark.parametrize("library", ["libnowhere.so", "libm.so.6"])  # not there, and there but no BLAS
def test_a_library_that_cannot_be_used_is_said_in_one_line(library: str, tmp_path: Path) -> None:
    said = f"mlx_kv:0: RuntimeWarning: MLX_KV_BLAS={library} cannot be loaded, or is no BLAS: "
    out, err = run(tmp_path, "import mlx_kv\n" + SAY, MLX_KV_BLAS=library)
    assert out == f"MLX's bundled reference BLAS ({library} cannot be loaded)"
    assert [line.startswith(said) for line in err] == [True]
    command = "import sys\nfrom mlx_kv.cli.main import main\nsys.argv = ['mlx-kv', '--version']\nmain()"
    out, err = run(tmp_path, command, MLX_KV_BLAS=library)
    assert out.startswith("mlx-kv, version")
    assert [line.startswith(said) for line in err] == [True]
