"""The wheel as a stranger gets it: built, installed into an empty environment, run from another directory; and what is
in it and in the sdist: the package, its bundled models, and nothing that made or tests them.
"""

from __future__ import annotations

import email
import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import mlx_kv
from mlx_kv.mlxlm.head_files import SUFFIX

ROOT = Path(__file__).parent.parent
EXTRA = "[cpu]" if sys.platform == "linux" else ""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MOST_BYTES = 15e6  # of a file that is uploaded: 13 MB are weights of the bundled models
NAME = f"mlx_kv-{mlx_kv.__version__}"
OF_A_MODEL = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "MODEL_CARD.md"}
BESIDE = {"README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore"}

pytestmark = pytest.mark.slow


def call(*arguments: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(list(map(str, arguments)), cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was made of it: the one that `make dist` has made, or a new one."""
    if made := os.environ.get("MLX_KV_DIST"):
        return Path(made)
    folder = tmp_path_factory.mktemp("built")
    call(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return built / f"{NAME}-py3-none-any.whl"


def of_the_package() -> set[str]:
    """Files of the checkout that a user needs: what Python runs, and what it reads beside that."""
    found = [path for path in (ROOT / "mlx_kv").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    models = [path for path in found if "models" in path.parts]
    assert {path.parent.name for path in models} == set(mlx_kv.bundled_models())
    kept = [path for path in found if path not in models or path.name in OF_A_MODEL or path.name.endswith(SUFFIX)]
    return {path.relative_to(ROOT).as_posix() for path in kept} | {"mlx_kv_command.py"}


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    information = {f"{NAME}.dist-info/{each}" for each in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    assert names == of_the_package() | information | {f"{NAME}.dist-info/licenses/LICENSE"}
    assert "mlx_kv/py.typed" in names
    assert wheel.stat().st_size < MOST_BYTES


def test_the_sdist_has_what_the_wheel_is_made_of(built: Path) -> None:
    sdist = built / f"{NAME}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {member.name.removeprefix(f"{NAME}/") for member in archive.getmembers() if member.isfile()}
    assert names - BESIDE == of_the_package()
    assert BESIDE - {".gitignore"} <= names
    assert sdist.stat().st_size < MOST_BYTES


def test_the_sdist_makes_the_wheel_that_the_checkout_makes(wheel: Path, tmp_path: Path) -> None:
    call(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_the_wheel_says_whom_it_is_for(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        told = email.message_from_string(archive.read(f"{NAME}.dist-info/METADATA").decode())
        licence = archive.read(f"{NAME}.dist-info/licenses/LICENSE")
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert (told["Version"], told["License-Expression"]) == (mlx_kv.__version__, "MIT")
    assert told["Requires-Python"] == PROJECT["requires-python"]
    assert set(told.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])


def test_the_wheel_runs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    call(sys.executable, "-m", "venv", tmp_path / "empty", cwd=tmp_path)
    binaries = tmp_path / "empty" / "bin"
    call(binaries / "python", "-m", "pip", "install", "--quiet", "--no-compile", f"{wheel}{EXTRA}", cwd=tmp_path)
    out = call(binaries / "mlx-kv", "generate", "--prompt", "import os", "--max-tokens", "5", "--json", cwd=tmp_path)
    assert json.loads(out)["generation_tokens"] == 5
    assert call(binaries / "mlx-kv", "--version", cwd=tmp_path).split()[-1] == mlx_kv.__version__
    where = call(binaries / "python", "-c", "import mlx_kv; print(mlx_kv.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path))
