"""`mlx-kv models`: what is on this machine, from files alone, and how much of it fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny_models import FAMILIES

from mlx_kv.bundled import bundled_models
from mlx_kv.cli.models import ModelFiles, fits_in_words, memory_of, most_tokens
from mlx_kv.mlxlm.loading import model_from_config
from mlx_kv.planning import Planner, Strategy, config_dtype, device
from mlx_kv.policy import CachePolicy

LLAMA: dict[str, Any] = {"model_type": "llama", **FAMILIES["llama"], "max_position_embeddings": 5000}
WINDOWED: dict[str, Any] = {"model_type": "gemma3_text", **FAMILIES["gemma3_text"]}
WEIGHTS = 1000  # bytes


def add_model(
    cache: Path, name: str, config: dict[str, Any] | None, weights: int = WEIGHTS, revision: str = "1"
) -> Path:
    """A repository as huggingface_hub keeps it."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / (revision * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / "main").write_text(revision * 40)
    if config is not None:
        (snapshot / "config.json").write_text(json.dumps(config))
    if weights:
        (snapshot / "model.safetensors").write_bytes(b"0" * weights)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    hub = tmp_path / "hub"
    hub.mkdir()
    add_model(hub, "org/tiny", LLAMA)
    add_model(hub, "org/unknown", {"model_type": "of-the-future"})
    add_model(hub, "org/config-only", LLAMA, weights=0)
    add_model(hub, "org/no-config", None)
    (hub / "datasets--org--texts" / "snapshots").mkdir(parents=True)
    return hub


def listed(command: Any, cache: Path) -> dict[str, dict[str, Any]]:
    done = command("models", "--json", "--cache-dir", cache)
    assert done.code == 0
    return {each["model"]: each for each in json.loads(done.out)["models"]}


def test_models_with_weights_are_listed_after_the_bundled_ones(command: Any, cache: Path) -> None:
    assert list(listed(command, cache)) == [*bundled_models(), "org/tiny", "org/unknown"]


def test_what_is_said_of_a_model_is_what_its_plan_says(command: Any, cache: Path) -> None:
    tiny = listed(command, cache)["org/tiny"]
    assert (tiny["bytes"], tiny["context"], tiny["model_type"], tiny["error"]) == (WEIGHTS, 5000, "llama", None)
    planner = Planner(model_from_config(LLAMA, mx.float32))
    (one, two) = (planner.bytes_held(Strategy("", CachePolicy()), count) for count in (1000, 1001))
    wide = mx.default_device().type == mx.DeviceType.cpu
    assert tiny["bytes_per_token"] == (two - one if wide else (two - one) // 2)
    assert tiny["weights"] == (2 * WEIGHTS if wide else WEIGHTS)  # no dtype in the config: bfloat16
    assert tiny["fits_tokens"] == 5000
    assert Path(tiny["path"], "config.json").is_file()


@pytest.mark.parametrize(
    ("config", "factor"),
    [({"dtype": "bfloat16"}, 2), ({"dtype": "float32"}, 1), ({"quantization": {"bits": 4, "group_size": 64}}, 1)],
)
def test_weights_take_what_they_take_when_loaded(
    tmp_path: Path, config: dict[str, Any], factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "on_cpu", lambda: True)
    folder = add_model(tmp_path, "org/tiny", LLAMA | config)
    assert memory_of(ModelFiles("org/tiny", folder, WEIGHTS), None).weights == factor * WEIGHTS


def test_as_many_tokens_fit_as_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_cpu", lambda: True)
    files = ModelFiles("org/tiny", add_model(tmp_path, "org/tiny", LLAMA), WEIGHTS)
    held = Planner(model_from_config(LLAMA, mx.float32)).bytes_held
    for tokens in (1, 17, 4999):
        room = 2 * WEIGHTS + held(Strategy("", CachePolicy()), tokens)
        assert memory_of(files, room).fits_tokens == tokens
        assert memory_of(files, room - 1).fits_tokens == tokens - 1
    assert fits_in_words(memory_of(files, 2 * WEIGHTS)) == "no: weights take 0.0 MB"
    assert fits_in_words(memory_of(files, 10**9)) == "all tokens"
    assert fits_in_words(memory_of(files, room)) == "4,999 tokens"
    assert fits_in_words(memory_of(files, None)) == "unknown memory"


@pytest.mark.parametrize("room", [-1, 0, 9, 10, 11, 99, 1000])
def test_the_search_is_exact(room: int) -> None:
    slow = max((n for n in range(8) if 10 * n <= room), default=0)
    assert most_tokens(lambda n: 10 * n, room, 7) == slow


def test_a_model_that_cannot_be_planned_says_why(command: Any, cache: Path) -> None:
    unknown = listed(command, cache)["org/unknown"]
    assert "of-the-future" in unknown["error"]
    (cache / "models--org--tiny" / "snapshots" / ("1" * 40) / "config.json").write_text("{")
    assert "is not JSON" in listed(command, cache)["org/tiny"]["error"]


def test_the_newest_revision_counts(command: Any, cache: Path) -> None:
    newer = add_model(cache, "org/tiny", LLAMA | {"max_position_embeddings": 77}, revision="2")
    os.utime(newer / "model.safetensors", (2**31, 2**31))
    os.utime(newer / "config.json", (2**31, 2**31))
    assert listed(command, cache)["org/tiny"]["context"] == 77


def test_the_table(command: Any, cache: Path) -> None:
    done = command("models", "--cache-dir", cache)
    words = [line.split() for line in done.out.splitlines()]
    assert words[0] == ["model", "size", "context", "bytes", "a", "token", "fits"]
    (tiny,) = [line for line in words if line and line[0] == "org/tiny"]
    assert tiny[1:4] == ["0.0", "MB", "5,000"]
    assert tiny[-2:] == ["all", "tokens"]
    assert "Memory for weights and caches: " in done.err


def test_an_empty_cache(command: Any, tmp_path: Path) -> None:
    done = command("models", "--cache-dir", tmp_path)
    assert done.code == 0
    assert "hf download" in done.err


def test_nothing_is_loaded_or_evaluated(cache: Path) -> None:
    code = "from mlx_kv.cli.main import main; import sys; sys.argv = ['mlx-kv', 'models', '--help']; main()"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True)
    assert "--cache-dir" in done.stdout
    assert "mlx.core" not in done.stderr
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    memory_of(ModelFiles("a", cache / "models--org--tiny" / "snapshots" / ("1" * 40), 1), 10**12)
    assert mx.get_peak_memory() - before < 1e6


# --- plans for this device --------------------------------------------------------------------------------------------


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_plan_for_this_device_is_what_its_caches_hold(tmp_path: Path, command: Any) -> None:
    """On a CPU they are in float32, whatever the config says: `load` makes the weights so."""
    sizes = {**FAMILIES["llama"], "dtype": "bfloat16"}
    folder = written(tmp_path / "tiny", {"model_type": "llama", **sizes})
    answer = json.loads(command("plan", "--json", "--context", "100", "--model", folder).out)
    wanted = "float32" if mx.default_device().type == mx.DeviceType.cpu else "bfloat16"
    assert answer["dtype"] == wanted
    fixed = command("plan", "--json", "--context", "100", "--model", folder, "--dtype", wanted).out
    assert json.loads(fixed)["strategies"] == answer["strategies"]
    given = json.loads(command("plan", "--json", "--model", folder, "--dtype", "float16").out)
    assert given["dtype"] == "float16"


def test_rows_are_of_what_the_model_has(tmp_path: Path, command: Any) -> None:
    def names(config: dict[str, Any]) -> list[str]:
        answer = json.loads(command("plan", "--json", "--model", written(tmp_path / "m", config)).out)
        return [row["name"] for row in answer["strategies"]]

    assert names({"model_type": "llama", **FAMILIES["llama"]}) == ["full", "full, 8 bits", "full, K8V4", "full, 4 bits"]
    window = "window + max_write - 1"
    assert names(WINDOWED)[:3] == ["full", "double window", window]
    assert names(WINDOWED)[3:] == [f"{window}, {how}" for how in ("8 bits", "K8V4", "4 bits")]


def test_the_dtype_of_the_config_counts_and_quantised_weights_do_not(
    tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    config = {"model_type": "llama", **FAMILIES["llama"]}
    assert config_dtype({"torch_dtype": "torch.float16"}) == "float16"
    assert config_dtype({"text_config": {"dtype": "float32"}}) == "float32"
    assert config_dtype(config) == config_dtype({"torch_dtype": "auto", "text_config": None}) == "bfloat16"
    quantised = {**config, "dtype": "float32", "quantization": {"group_size": 64, "bits": 4}}
    wide, narrow = (
        json.loads(command("plan", "--json", "--model", written(tmp_path / "tiny", each)).out)["strategies"][0]
        for each in (quantised, config)
    )
    assert wide["bytes_held"] == [2 * count for count in narrow["bytes_held"]]
