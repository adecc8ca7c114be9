"""Fingerprints of models and tokenizers, so that caches are never used with another model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, is_dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

SAMPLE = 16  # values of each weight, three times


def model_fingerprint(model: nn.Module, tokenizer: Any = None) -> str:
    """32 hex digits that identify a model, and as many for the tokenizer if one is given.

    A digest of the model's class, its configuration, and the names, shapes and dtypes of its weights with 48 values of
    each; and of the tokenizer's vocabulary. Models that differ only in other values have the same fingerprint.
    """
    weights: list[Any] = sorted(tree_flatten(model.parameters()))  # type: ignore[no-untyped-call]
    samples = []
    for _, weight in weights:
        flat, middle = weight.reshape(-1), weight.size // 2
        parts = [flat[:SAMPLE], flat[middle : middle + SAMPLE], flat[-SAMPLE:]]
        samples.append(mx.concatenate(parts).view(mx.uint8))
    mx.eval(samples)
    args: Any = getattr(model, "args", None)
    settings = asdict(args) if is_dataclass(args) and not isinstance(args, type) else {}
    configuration = json.dumps(settings, sort_keys=True, default=lambda unknown: type(unknown).__name__)
    digest = hashlib.blake2b(f"{type(model).__module__} {configuration} ".encode(), digest_size=16)
    for (name, weight), sample in zip(weights, samples, strict=True):
        digest.update(f"{name} {weight.shape} {weight.dtype} ".encode())
        digest.update(bytes(sample.tolist()))  # type: ignore[arg-type]
    if tokenizer is None:
        return digest.hexdigest()
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return f"{digest.hexdigest()}-{hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()}"


def check_fingerprint(what: str, saved: str | None, own: str, made_with: str | None = None) -> None:
    """Refuses caches of another model or, if both fingerprints include a tokenizer, of another tokenizer.

    Args:
        what: the name of the file, for the message.
        saved, own: the fingerprints of the file and of the model that is to continue from it.
        made_with: the name of the model that the file was made with, for the message.

    Raises:
        ValueError: they differ, or the file has none.
    """
    if saved is None:
        raise ValueError(f"{what} has no fingerprint of a model: make it again with mlx-kv cache")
    fix = "make it again" + (f", or give the model that it was made with, {made_with}" if made_with else "")
    (model, _, tokenizer), (own_model, _, own_tokenizer) = saved.partition("-"), own.partition("-")
    if model != own_model:
        raise ValueError(f"{what} is a prompt cache of another model: {fix}")
    if tokenizer and own_tokenizer and tokenizer != own_tokenizer:
        raise ValueError(f"{what} is a prompt cache of a model with another tokenizer: {fix}")
