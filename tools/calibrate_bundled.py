"""Calibrations of the bundled models: `python tools/calibrate_bundled.py [FOLDER]`, by default mlx_kv/models.

Each model gets two files with the same numbers, since its fingerprint covers the dtype of its weights:
NAME.kvcal.safetensors beside its directory for float32, as it is loaded on a CPU, and float16.kvcal.safetensors in it
for a GPU. Prints a line for each model: bytes, seconds, and the quality of the fit.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx_kv  # noqa: F401  before MLX: it loads a tuned BLAS

# isort: split
import numpy as np

from mlx_kv.bundled import FOLDER, bundled_models, model_path
from mlx_kv.calibration import calibrate
from mlx_kv.evaluation.tasks import ContextShape, RecallLanguage, find_language, recall
from mlx_kv.files.calibration_file import SUFFIX, save_calibration
from mlx_kv.files.fingerprint import model_fingerprint
from mlx_kv.mlxlm.loading import load, load_lazily

TEXTS, CONTEXT, PAIRS = 26, 480, 24  # of the recall model, which has 1,024 positions


def recall_texts() -> list[list[int]]:
    """Contexts of made-up words with pairs in them."""
    shape = ContextShape(TEXTS, CONTEXT, 4, 16)
    found: list[list[int]] = recall(np.random.default_rng(32), RecallLanguage(), shape, PAIRS).context.tolist()
    return found


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name in bundled_models():
        started = time.perf_counter()
        model, tokenizer = load(model_path(name))
        texts: Any = recall_texts() if isinstance(find_language(tokenizer), RecallLanguage) else None
        found = calibrate(model, tokenizer, texts)
        stored, _, _ = load_lazily(model_path(name))
        (folder / name).mkdir(exist_ok=True)
        files = (folder / f"{name}{SUFFIX}", folder / name / f"float16{SUFFIX}")
        save_calibration(files[0], found)
        save_calibration(files[1], replace(found, fingerprint=model_fingerprint(stored)))
        size, seconds = files[0].stat().st_size, time.perf_counter() - started
        print(f"{name}: {size:,} bytes, {seconds:.0f} s, {found.details['quality']}, {found.heads}")


if __name__ == "__main__":
    main()
