"""Public names of calibrations: calls that work."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx_kv

# isort: split
from calls import Call, folder, models


@cache
def calibration() -> Any:
    """Of budgets alone, of a short text."""
    model, tokenizer, _ = models()
    made = mlx_kv.calibrate(model, tokenizer, [[5, 6, 7, 8] * 16], budgets_only=True)
    mlx_kv.save_calibration(folder() / "kept.kvcal.safetensors", made)
    return made


def measuring() -> dict[str, Any]:
    model, tokenizer, _ = models()
    known = {"model": model, "tokenizer": tokenizer, "texts": [[5, 6, 7, 8] * 16], "budgets_only": True}
    return {**known, "progress": None, "resume": None}


def of_model() -> dict[str, Any]:
    return {"fingerprint": "x", "heads": [[1.0, 3.0]], "layers": None, "details": None}


def reading() -> dict[str, Any]:
    calibration()
    return {"path": folder() / "kept.kvcal.safetensors", "model": None}


CALIBRATION_CALLS: dict[str, list[Call] | str] = {
    "Calibration": [Call(mlx_kv.Calibration, of_model, lambda made: made.name)],
    "calibrate": [
        Call(
            mlx_kv.calibrate,
            measuring,
            calls=frozenset({"progress"}),
            flags=frozenset({"budgets_only"}),
            raises=(UnicodeEncodeError,),
        )
    ],
    "load_calibration": [
        Call(mlx_kv.load_calibration, reading, raises=(FileNotFoundError, UnicodeEncodeError)),
    ],
    "save_calibration": [
        Call(
            mlx_kv.save_calibration,
            lambda: {"path": folder() / "new.kvcal.safetensors", "calibration": calibration(), "force": True},
            flags=frozenset({"force"}),
            raises=(OSError, UnicodeEncodeError),
        )
    ],
}
