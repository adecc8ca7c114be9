"""docs/architecture.md is true: its picture shows the imports, its names exist, and its examples work.

The examples are run as a stranger would: as modules outside the package, which use public names only.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from tiny_models import make_model

import mlx_kv
from mlx_kv import CachePolicy, make_prompt_cache
from mlx_kv.cache import codecs
from mlx_kv.cache.eviction import scores
from mlx_kv.cli.main import command as group
from mlx_kv.generation.speculation import drafters

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()

sys.path.append(str(ROOT / "tools"))

import draw_rooms  # noqa: E402

# --- the picture --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("picture", draw_rooms.pictures(), ids=lambda path: path.stem)
def test_the_picture_shows_the_imports(picture: Path) -> None:
    assert draw_rooms.drawn_house(picture) == draw_rooms.read_house(), "draw it again: python tools/draw_rooms.py"
    assert f"({picture.name}#" in PAGE


def test_arrows_lead_down() -> None:
    house = draw_rooms.read_house()
    assert len(house.floors) > 10
    assert all(house.floors[room] < house.floors[other] for room, other in house.arrows)


@pytest.mark.parametrize("room", sorted(ROOT.glob("mlx_kv/**/__init__.py")), ids=lambda file: file.parent.name)
def test_a_room_that_lists_its_files_lists_all(room: Path) -> None:
    told = ast.get_docstring(ast.parse(room.read_text())) or ""
    listed = set(re.findall(r"(\w+\.py)\b", told))
    assert listed in (set(), {file.name for file in room.parent.glob("*.py")} - {room.name})


# --- the names ----------------------------------------------------------------------------------------------------


def test_names_in_the_text_exist() -> None:
    rooms = "|".join(draw_rooms.read_house().floors)
    names = re.findall(rf"`((?:{rooms})\.\w[\w.]*)`", PAGE)
    assert len(names) > 8
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(f"mlx_kv.{module}"), attribute), name


# --- the examples -------------------------------------------------------------------------------------------------

MOST_LINES = 15
ASKED = ("--prompt", "import os\n" * 80, "--kv-budget", "96", "--kv-score", "ends", "--max-tokens", "2")


def code_below(heading: str) -> str:
    section = PAGE.partition(f"\n### {heading}\n")[2].partition("\n### ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
    return str(code)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports the example below a heading, as a module of its own; what it registers is forgotten with the test."""
    for found in (scores.SCORES, codecs.CODECS, drafters.DRAFTERS):
        monkeypatch.setattr(found, "registered", dict(found.registered))
    monkeypatch.syspath_prepend(tmp_path)

    def run(heading: str) -> ModuleType:
        code = code_below(heading)
        assert len([line for line in code.splitlines() if line.strip()]) <= MOST_LINES
        name = f"outside_{heading.split()[-1]}"
        (tmp_path / f"{name}.py").write_text(code)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return run


def read(model: Any, policy: CachePolicy, tokens: mx.array) -> list[Any]:
    """Caches that have read a row of tokens, in chunks."""
    caches = make_prompt_cache(model, policy)
    for start in range(0, tokens.size, 40):
        model(tokens[None, start : start + 40], cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches


def check_loaded(model: Any, caches: list[Any], file: Path) -> list[Any]:
    """The caches again, from a file: they go on in the same way."""
    mlx_kv.save_prompt_cache(file, caches)
    loaded = mlx_kv.load_prompt_cache(file)
    goes_on = [model(mx.array([[7, 8, 9]]), cache=each) for each in (caches, loaded)]
    assert mx.array_equal(*goes_on)
    return loaded


def test_a_score(example: Callable[[str], ModuleType], command: Callable[..., Any], tmp_path: Path) -> None:
    policy = example("A score").policy
    assert "ends" in mlx_kv.score_names()
    model, tokens = make_model("llama"), mx.arange(200) % 64
    caches = read(model, replace(policy, budget=40, keep_recent=8, margin=8), tokens)
    mlx_kv.compact(caches)
    for cache in caches:
        kept = cache.positions[0, 0].tolist()
        assert len(kept) == 40
        assert sorted(kept)[:12] == list(range(12))
        assert sorted(kept)[-12:] == list(range(188, 200))
    for cache in check_loaded(model, caches, tmp_path / "kept.safetensors"):
        assert cache.evictor.score.name == "ends"
    called = command("generate", *ASKED)
    assert called.code == 0
    assert "evicted" in called.err


@pytest.mark.slow
def test_the_command_finds_what_a_package_brings(tmp_path: Path) -> None:
    """An entry point, as a package that was installed has it; nothing of that package is imported by hand."""
    (tmp_path / "outside.py").write_text(code_below("A score").partition("mlx_kv.register_score")[0])
    information = tmp_path / "outside-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[mlx_kv.scores]\nends = outside:ends\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    program = [sys.executable, "-m", "mlx_kv.cli", "generate", *ASKED]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "evicted" in done.stderr


def test_a_codec(example: Callable[[str], ModuleType], tmp_path: Path) -> None:
    policy = example("A codec").policy
    assert "int8" in mlx_kv.codec_names()
    model, tokens = make_model("llama"), mx.arange(100) % 64
    caches = read(model, policy, tokens)
    plain = read(model, CachePolicy(), tokens)
    assert all(cache.nbytes < exact.nbytes / 2 for cache, exact in zip(caches, plain, strict=True))
    for ours, theirs in zip(caches[0].keys_and_values(), plain[0].keys_and_values(), strict=True):
        assert ours.dtype == theirs.dtype
        rounding = mx.abs(theirs).max(axis=-1, keepdims=True) / 127 / 2
        assert 0 < (mx.abs(ours - theirs) / rounding).max() < 1.001
    check_loaded(model, caches, tmp_path / "bytes.safetensors")
    # It goes with all other parts: a ring, a budget, a batch whose rows are trimmed on their own.
    others = ({"max_kv_size": 32}, {"budget": 40, "keep_recent": 8}, {"codec": ("int8", "plain")})
    for other in (replace(policy, **settings) for settings in others):
        batch = [type(cache).merge([cache, cache]) for cache in read(model, other, tokens)]
        mlx_kv.trim_prompt_cache(batch, [0, 3])
        assert mx.isfinite(model(mx.array([[5], [6]]), cache=batch)).all()


@pytest.mark.slow
def test_a_drafter(example: Callable[[str], ModuleType], reference: tuple[Any, Any]) -> None:
    example("A drafter")
    assert "repeating" in mlx_kv.drafter_names()
    model, tokenizer = reference
    prompt = "import os\nimport sys\n" * 8
    counts = mlx_kv.SpeculationStatistics()
    drafted = mlx_kv.speculative_generate(
        model, None, tokenizer, prompt, max_tokens=24, statistics=counts, drafter="repeating"
    )
    alone = mlx_kv.stream_generate(model, tokenizer, prompt, max_tokens=24)
    assert [each.token for each in drafted] == [each.token for each in alone]
    assert counts.accepted > 0

    def rows(**options: Any) -> list[list[int]]:
        texts: list[list[int]] = [[], [], []]
        for token in mlx_kv.batch_generate(model, tokenizer, prompts, max_tokens=16, **options):
            texts[token.index].append(token.token)
        return texts

    prompts = [prompt, "def main():\n", prompt[:40]]
    assert rows(drafter="repeating") == rows()


def test_a_command(
    example: Callable[[str], ModuleType], command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "commands", dict(group.commands))
    group.add_command(example("A command").kinds)
    called = command("kinds")
    assert (called.code, called.out) == (0, "KVCache\n")
    assert command("kinds", "--model", "/nowhere").code == 2
