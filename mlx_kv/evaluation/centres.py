"""Where a model's keys lie, measured on a text: what `Centred` takes away before they are quantised.

Decides how the text is read and what counts: the mean of all tokens that a layer keeps. Knows nothing about what it is
good for; `codec_loss` measures that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.checks import token_ids
from mlx_kv.cache.codecs import Affine, Centre, CentredByLayer, Codec
from mlx_kv.evaluation.codec_loss import PLAIN
from mlx_kv.evaluation.reading import Progress, check_length
from mlx_kv.generation.prefill import prefill_step, read_chunk
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.loading import vocabulary_of
from mlx_kv.mlxlm.traverse import is_ours, leaves

LEAST_TOKENS = 64  # a mean of fewer says where these lie, not where keys do


def centred(
    model: nn.Module,
    tokens: Sequence[int],
    codec: Codec | None = None,
    progress: Progress | None = None,
) -> CentredByLayer:
    """A codec for the keys of a model: those less their centres, which are measured on a text.

    In `CachePolicy(codec=(centred(model, tokens), Affine(4, 64, rotate=True)))`, say.

    Args:
        model: as from `mlx_kv.load`.
        tokens: n of them, of any text such as the model reads; a thousand is plenty.
        codec: how what is left is stored; None is 4 bits in groups of 64, rotated.
        progress: told after each chunk the tokens read, and all that are read.

    Raises:
        ValueError: a text that is too short, or too long for the model; token ids that the model does not have.
    """
    tokens = token_ids(tokens, vocabulary_of(model), "the text")
    if len(tokens) < LEAST_TOKENS:
        raise ValueError(f"a text of {len(tokens)} tokens says nothing about keys: give {LEAST_TOKENS} or more")
    check_length(model, len(tokens))
    caches = make_prompt_cache(model, PLAIN)
    step = prefill_step(model, caches, None)
    for first in range(0, len(tokens), step):
        last = min(first + step, len(tokens))
        read_chunk(model, caches, mx.array([tokens[first:last]]))
        if progress is not None:
            progress(last, len(tokens))
    return CentredByLayer(tuple(map(_centre, leaves(caches))), codec or Affine(4, 64, rotate=True))


def _centre(cache: Any) -> Centre | None:
    """Of the keys that a cache holds; None where it holds none."""
    if not is_ours(cache) or cache.keys is None:
        return None
    keys, _ = cache.keys_and_values()
    assert isinstance(keys, mx.array), "plain ones are not packed"
    return Centre.of(keys)
