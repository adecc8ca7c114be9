"""The wheel as a stranger gets it: built, installed into an empty environment, run from another directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXTRA = "[cpu]" if sys.platform == "linux" else ""


def call(*arguments: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(list(map(str, arguments)), cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_runs_in_an_empty_environment(tmp_path: Path) -> None:
    call(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("mlx_kv-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert wheel.stat().st_size < 12e6
    assert "mlx_kv/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "tools/", "benchmarks/"))]
    call(sys.executable, "-m", "venv", tmp_path / "empty", cwd=tmp_path)
    binaries = tmp_path / "empty" / "bin"
    call(binaries / "python", "-m", "pip", "install", "--quiet", f"{wheel}{EXTRA}", cwd=tmp_path)
    out = call(binaries / "mlx-kv", "generate", "--prompt", "import os", "--max-tokens", "5", "--json", cwd=tmp_path)
    assert json.loads(out)["generation_tokens"] == 5
    where = call(binaries / "python", "-c", "import mlx_kv; print(mlx_kv.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path))
