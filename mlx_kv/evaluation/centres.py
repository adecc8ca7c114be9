"""The mean keys of a model, measured on a text: `Centred` subtracts them before quantisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.checks import token_ids
from mlx_kv.cache.codecs import Affine, Centre, CentredByLayer, Codec
from mlx_kv.evaluation.codec_loss import PLAIN
from mlx_kv.evaluation.reading import Progress, check_length, read
from mlx_kv.generation.prefill import prefill_step
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.loading import vocabulary_of
from mlx_kv.mlxlm.traverse import is_ours, leaves

MIN_TOKENS = 64  # the mean of fewer depends on the text


def centred(
    model: nn.Module,
    tokens: Sequence[int],
    codec: Codec | None = None,
    progress: Progress | None = None,
) -> CentredByLayer:
    """A codec for the keys of a model that subtracts their mean over a text before quantisation.

    Args:
        model: as from `mlx_kv.load`.
        tokens: of a text like those that the model reads; 1,000 are enough.
        codec: of the differences; None is 4 bits in groups of 64, rotated.
        progress: called after each chunk with the tokens read, and all that will be read.

    Raises:
        ValueError: a text that is too short, or too long for the model; token ids outside the vocabulary.

    Example:
        >>> CachePolicy(codec=(centred(model, tokens), Affine(4, 64, rotate=True)))  # doctest: +SKIP
    """
    tokens = token_ids(tokens, vocabulary_of(model), "the text")
    if len(tokens) < MIN_TOKENS:
        raise ValueError(f"a text of {len(tokens)} tokens is too short to measure keys: give {MIN_TOKENS} or more")
    check_length(model, len(tokens))
    caches = make_prompt_cache(model, PLAIN)
    read(model, caches, mx.array([tokens]), prefill_step(model, caches, None), progress)
    return CentredByLayer(tuple(map(_centre, leaves(caches))), codec or Affine(4, 64, rotate=True))


def _centre(cache: Any) -> Centre | None:
    """The centre of the keys in a cache; None where it has none."""
    if not is_ours(cache) or cache.keys is None:
        return None
    keys, _ = cache.keys_and_values()
    assert isinstance(keys, mx.array), "plain keys are not packed"
    return Centre.of(keys)
