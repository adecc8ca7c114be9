"""Files of calibrations: read as they were written, refused, found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny_models import make_model

from mlx_kv import Calibration, calibrate, load_calibration, save_calibration
from mlx_kv.cache.codecs import Centre
from mlx_kv.cache.eviction.calibration import BitsLoss
from mlx_kv.files import tensor_files
from mlx_kv.files.calibration_file import FOLDER, beside, default_path, find_calibration
from mlx_kv.files.serialization import model_fingerprint


@pytest.fixture(scope="session")
def calibration(tiny: nn.Module, texts: list[list[int]]) -> Calibration:
    return calibrate(tiny, None, texts[:6])


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_it_is_read_as_it_was_written(calibration: Calibration, tiny: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "x.kvcal.safetensors"
    save_calibration(path, calibration)
    loaded = load_calibration(path, tiny)
    assert loaded == calibration
    assert loaded.heads == calibration.heads
    assert loaded.details == calibration.details
    assert loaded.score.name == calibration.score.name
    save_calibration(path, loaded)  # its own kind may be replaced
    assert load_calibration(path) == calibration


def test_every_number_of_losses_and_centres_is_read_back(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "x.kvcal.safetensors"
    centres = (None, Centre.of(mx.random.normal((1, 2, 1, 8))), None, Centre.of(mx.full((1, 1, 1, 4), 6e-8)))
    losses = (BitsLoss(4, 4, 64, "rotated", 999, 0.1 + 0.2, 1 / 3), BitsLoss(8, 4, 32, None, 1234, -1e-17, 5e-324))
    written = replace(calibration, losses=losses, centres=centres)
    save_calibration(path, written)
    loaded = load_calibration(path)
    assert loaded.losses == losses
    assert loaded.centres == centres
    assert loaded.name == written.name != calibration.name


def test_budgets_alone_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "x.kvcal.safetensors"
    save_calibration(path, Calibration("f", ((1.0, 3.3), (0.123456789, 2.0))))
    loaded = load_calibration(path)
    assert loaded == Calibration("f", ((1.0, 3.3), (0.123456789, 2.0)))
    assert loaded.layers == ()


def test_another_model_is_refused(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "x.kvcal.safetensors"
    save_calibration(path, calibration)
    with pytest.raises(ValueError, match=r"x\.kvcal\.safetensors is a calibration of another model: run mlx-kv calib"):
        load_calibration(path, make_model("llama", seed=1))


def test_a_file_of_others_stays(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "x.kvcal.safetensors"
    path.write_text("mine")
    with pytest.raises(ValueError, match="exists and is not a calibration: give another name, or force=True to"):
        save_calibration(path, calibration)
    assert path.read_text() == "mine"
    save_calibration(path, calibration, force=True)
    assert load_calibration(path) == calibration


def changed(path: Path, words: dict[str, str | None] | None = None, **arrays: mx.array | None) -> None:
    file = tensor_files.read(path)
    told = {name: word for name, word in (file.words | (words or {})).items() if word is not None}
    changes = {name.replace("__", "."): array for name, array in arrays.items()}
    kept = {name: array for name, array in (file.arrays | changes).items() if array is not None}
    tensor_files.write(path, kept, told)


NAN = mx.array([float("nan"), 0.0])
DAMAGE: dict[str, dict[str, Any]] = {
    "NaN": {"layers__0__bias": NAN},
    "another number": {"layers__0__bias": mx.array([0.5, 0.0])},
    "dtype": {"layers__0__bias": mx.zeros((2,), mx.float16)},
    "shape of weights": {"layers__1__weights": mx.zeros((5, 2))},
    "no matrix": {"layers__1__weights": mx.zeros((5,))},
    "shape of bias": {"layers__1__bias": mx.zeros((3,))},
    "missing": {"layers__2__bias": None},
    "half a RoPE": {"layers__0__key_rope__factor": None},
    "no RoPE without pairs": {"layers__0__key_rope__pairs": None},
    "channels beyond": {"layers__0__key_rope__pairs": mx.full((16, 2), 999, mx.int32)},
    "channels twice": {"layers__0__key_rope__pairs": mx.zeros((16, 2), mx.int32)},
    "factor 0": {"layers__0__key_rope__factor": mx.array(0.0)},
    "another layer": {"layers__9__bias": mx.zeros((2,))},
    "another array": {"layers__0__more": mx.zeros((2,))},
    "another centre": {"centres__0": mx.ones((2, 16), mx.float16)},
    "no centre": {"centres__0": None},
    "dtype of a centre": {"centres__0": mx.ones((2, 16))},
    "shape of a centre": {"centres__0": mx.ones((2, 16, 1), mx.float16)},
    "a centre that is not finite": {"centres__0": mx.full((2, 16), float("inf"), mx.float16)},
    "fewer centres": {"words": {"centres": "1"}},
    "centres that are no number": {"words": {"centres": "all"}},
    "heads": {"words": {"heads": "[[1, 2], [3]]"}},
    "heads that are no list": {"words": {"heads": "7"}},
    "heads of others": {"words": {"heads": json.dumps([[1, 1, 1]] * 3)}},
    "NaN in heads": {"words": {"heads": "[[NaN, 1], [1, 1], [1, 1]]"}},
    "no JSON": {"words": {"heads": "["}},
    "no details": {"words": {"details": None}},
    "details": {"words": {"details": "[]"}},
    "no fingerprint": {"words": {"fingerprint": None}},
    "name": {"words": {"name": "000000000000"}},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_refused_in_one_line(calibration: Calibration, tmp_path: Path, damage: dict[str, Any]) -> None:
    path = tmp_path / "x.kvcal.safetensors"
    save_calibration(path, calibration)
    changed(path, **damage)
    with pytest.raises(
        ValueError, match=r"^\S+x\.kvcal\.safetensors was damaged \(.+\): make it again with mlx-kv cal"
    ):
        load_calibration(path)


def test_what_is_no_calibration_is_refused(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "x.kvcal.safetensors"
    tensor_files.write(path, {"a": mx.zeros(3)}, {"format": "pt"})
    with pytest.raises(
        ValueError, match="is not a calibration that this version reads: make it again with mlx-kv calibr"
    ):
        load_calibration(path)
    path.write_text("words")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load_calibration(path)
    save_calibration(path, calibration, force=True)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="was cut off or damaged"):
        load_calibration(path)
    with pytest.raises(FileNotFoundError):
        load_calibration(tmp_path / "none")


# --- where they are ---------------------------------------------------------------------------------------------------


def test_it_is_found_beside_the_model_in_it_and_in_the_cache(
    calibration: Calibration, tiny: nn.Module, tmp_path: Path
) -> None:
    folder = tmp_path / "models" / "llama"
    folder.mkdir(parents=True)
    cache = tmp_path / "cache" / "mlx-kv" / FOLDER
    cache.mkdir(parents=True)
    assert find_calibration(folder, tiny) is None
    for path in (beside(folder), folder / "a.kvcal.safetensors", cache / "b.kvcal.safetensors"):
        save_calibration(path, calibration)
        assert find_calibration(folder, tiny) == calibration
        assert find_calibration(folder, make_model("llama", seed=1)) is None
        path.unlink()
    save_calibration(cache / "b.kvcal.safetensors", calibration)
    assert find_calibration("org/model", tiny) == calibration


def test_others_in_these_places_are_ignored(calibration: Calibration, tiny: nn.Module, tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    beside(folder).write_text("no calibration")
    save_calibration(folder / "a.kvcal.safetensors", Calibration("another", ((1.0,),)))
    save_calibration(folder / "b.kvcal.safetensors", calibration)
    (folder / "c.kvcal.safetensors").mkdir()
    assert find_calibration(folder, tiny) == calibration


def test_where_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: nn.Module) -> None:
    folder, own = tmp_path / "llama", model_fingerprint(tiny)
    folder.mkdir()
    cache = tmp_path / "cache" / "mlx-kv" / FOLDER
    assert default_path(folder, own) == tmp_path / "llama.kvcal.safetensors"
    assert default_path("org/model", own) == cache / f"org--model-{own[:8]}.kvcal.safetensors"
    assert default_path(folder, own, beside_model=False) == cache / f"llama-{own[:8]}.kvcal.safetensors"
    save_calibration(beside(folder), Calibration("another", ((1.0,),)))
    assert default_path(folder, own).parent == cache  # that of another model stays
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert default_path(folder, "another").parent == cache
