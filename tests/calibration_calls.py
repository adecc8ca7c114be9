"""Public names of calibrations: calls that work."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx_kv

# isort: split
import mlx.core as mx
from calls import Call, folder, models

from mlx_kv.mlxlm.head_files import HeadShape


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


@cache
def head() -> Any:
    """A head that drafts, with random weights, which a file has, too."""
    model, _, _ = models()
    made = HeadShape(256, 4, 2, 64, 64, 500).make_head()
    made.guess_only(mx.arange(500, dtype=mx.int32))
    made.bind(model)
    mlx_kv.save_draft_head(folder() / "kept.kvdraft.safetensors", made, model)
    return made


def reading_head() -> dict[str, Any]:
    head()
    return {"path_or_hub_id": folder() / "kept.kvdraft.safetensors", "model": models()[0], "whole": True}


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
    "load_draft_head": [Call(mlx_kv.load_draft_head, reading_head, flags=frozenset({"whole"}))],
    "save_draft_head": [
        Call(
            mlx_kv.save_draft_head,
            lambda: {
                "path": folder() / "new.kvdraft.safetensors",
                "head": head(),
                "model": models()[0],
                "force": True,
            },
            flags=frozenset({"force"}),
            raises=(OSError, UnicodeEncodeError),
        )
    ],
    "train_drafter": "it trains for seconds at least: its own tests have its arguments",
}
