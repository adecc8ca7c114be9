"""Calibration of a model: how many tokens each head needs, a fitted score, the loss by bits, and centres of keys.

Each text is read twice, as for the score `kvzip`. The attention that tokens receive gives the budgets of heads; a ridge
regression of it on keys and values gives the score "fitted". Held-out texts give the loss that fewer bits add.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from mlx_kv import __version__
from mlx_kv.cache.checks import check_type
from mlx_kv.cache.codecs import Centre
from mlx_kv.cache.eviction.calibration import BitsLoss, Calibration
from mlx_kv.calibration.fit import Work
from mlx_kv.calibration.loss import CANDIDATES, measure_bits, measure_centres
from mlx_kv.calibration.texts import MIN_TOKENS, default_texts, single_text
from mlx_kv.files.serialization import model_fingerprint
from mlx_kv.generation.encoding import tokens_of_prompt, wrap_tokenizer
from mlx_kv.generation.prefill import Instructions
from mlx_kv.mlxlm.loading import context_length, vocabulary_of
from mlx_kv.mlxlm.probe import architecture, check_model

__all__ = ["calibrate"]

HELD_OUT = 6  # every sixth text is held out to measure the fit
PACKAGES = ("mlx", "mlx-lm")


def calibrate(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str | Sequence[int]] | None = None,
    *,
    budgets_only: bool = False,
    progress: Callable[[int, int], None] | None = None,
    resume: str | Path | None = None,
) -> Calibration:
    """Measures a model for its budgets of KV caches, and for the bits that it bears.

    Each text is read twice, as for the score "kvzip" (Kim et al. 2025), and the largest attention that each token
    receives while its text is repeated is recorded. Ranking all tokens of all heads and layers by it gives the budget
    of each head; a ridge regression of its logarithm on the cached keys and values gives the score "fitted". The loss
    that fewer bits add is measured on the held-out texts, and the mean keys on the first text.

    Args:
        model: any model of mlx-lm whose attention can be seen.
        tokenizer: as `load` returns it; it may be None if texts are token ids.
        texts: strings or token ids, of at least 64 tokens each; 6 or more to fit a score, of which every sixth is
            held out to measure the fit. None: texts of Python's library and of this package, in several languages.
        budgets_only: measure the budgets of heads and nothing else. By default of one text of 1,000 tokens.
        progress: called after each text, and after each number of bits, with the number of them done, and of all.
        resume: a directory for intermediate measurements, made if it is not there and removed at the end. A call
            with the same model and texts continues an interrupted one, with the same result to the bit.

    Returns:
        The calibration, for `CachePolicy` or `save_calibration`.

    Raises:
        TypeError: an argument of another type.
        ValueError: texts that are too short or too few, a model that hides its attention or that rotates keys in a way
            that cannot be undone, or a `resume` that is no directory of a calibration.

    Example:
        >>> model, tokenizer = load("reference")  # doctest: +SKIP
        >>> save_calibration("reference.kvcal.safetensors", calibrate(model, tokenizer))  # doctest: +SKIP
    """
    check_model("model", model)
    check_type("texts", texts, Sequence | None, "give a list of texts, each a string or token ids")
    if isinstance(texts, str | bytes):
        raise TypeError("texts is one text: give a list of texts")
    check_type("progress", progress, Callable | None, "give a function of two numbers, or None")
    check_type("resume", resume, str | os.PathLike | None, "give the name of a directory")
    tokenizer = None if tokenizer is None and texts is not None else wrap_tokenizer(tokenizer)
    positions = context_length(model)
    if texts is None:
        texts = (single_text if budgets_only else default_texts)(tokenizer, positions)
    vocabulary = vocabulary_of(model)
    ids = [tokens_of_prompt(tokenizer, text, vocabulary, f"text {i}") for i, text in enumerate(texts)]
    check_texts(ids, budgets_only)
    fingerprint = model_fingerprint(model)
    digest = hashlib.blake2b(json.dumps([list(map(int, text)) for text in ids]).encode(), digest_size=16).hexdigest()
    work = Work(model, f"{fingerprint} {digest} {budgets_only}", None if resume is None else Path(resume))
    instructions = Instructions.of(tokenizer, model)
    done, total = count(1), len(ids) + (0 if budgets_only else len(CANDIDATES))

    def advance() -> None:
        if progress is not None:
            progress(next(done), total)

    for index, text in enumerate(ids):
        held_out = not budgets_only and index % HELD_OUT == HELD_OUT - 1
        if not work.has(index, held_out):
            work.read(index, text, instructions, fits=not budgets_only, held_out=held_out)
        advance()
    layers, qualities = work.fitted() if not budgets_only else ([], [])
    details: dict[str, Any] = {
        "architecture": architecture(model),
        "texts": len(ids),
        "tokens": sum(map(len, ids)),
        "longest": max(map(len, ids)),
        "digest": digest,
        "versions": {"mlx-kv": __version__} | {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    if qualities:
        means = np.mean(np.array(qualities), axis=0)
        details["held_out"] = len(range(HELD_OUT - 1, len(ids), HELD_OUT))
        details["quality"] = dict(zip(qualities[0]._fields, (round(float(mean), 4) for mean in means), strict=True))
        details["quality_by_layer"] = [[round(number, 4) for number in layer] for layer in qualities]
    losses: tuple[BitsLoss, ...] = ()
    centres: tuple[Centre | None, ...] = ()
    if not budgets_only:
        losses, centres = measure_bits(model, ids[HELD_OUT - 1 :: HELD_OUT], advance), measure_centres(model, ids[0])
    calibration = Calibration(fingerprint, work.head_table(), tuple(layers), details, losses, centres)  # type: ignore[arg-type]
    work.remove()
    return calibration


def check_texts(texts: Sequence[Sequence[int]], budgets_only: bool = False) -> None:
    """Raises ValueError for texts, as token ids, that cannot be calibrated on."""
    min_texts = 1 if budgets_only else HELD_OUT
    if len(texts) < min_texts:
        raise ValueError(
            f"got {len(texts)} text{'' if len(texts) == 1 else 's'}, and a calibration takes {min_texts} or more: give "
            "more texts" + ("" if budgets_only else ", or measure budgets only")
        )
    for index, text in enumerate(texts):
        if len(text) < MIN_TOKENS:
            raise ValueError(f"text {index} has {len(text)} tokens, of at least {MIN_TOKENS}: give longer texts")
