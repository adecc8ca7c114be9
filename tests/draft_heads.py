"""Heads of tiny models, with random weights, and heads that know what a model will say."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from tiny_models import VOCAB
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from mlx_kv.calibration import drafter
from mlx_kv.mlxlm.heads import DraftHead
from mlx_kv.mlxlm.taps import HiddenTap

# A training of seconds.
FEW = {"FIRST_ROUNDS": 1, "ROUND_REQUESTS": 3, "ROUND_TEXTS": 3, "ANSWER": 24, "PIECE": 64, "HELD_OUT": 3, "WARM_UP": 2}


def random_head(model: nn.Module, seed: int = 1, kind: type[DraftHead] = DraftHead, **options: Any) -> DraftHead:
    """A head of a model, with a layer of llama's."""
    tap = HiddenTap(model)
    size = tap.embed(mx.array([[0]])).shape[-1]
    args = llama.ModelArgs("llama", size, 1, 64, 4, 1e-5, 1, head_dim=32, num_key_value_heads=2)
    mx.random.seed(seed)
    head = kind(llama.TransformerBlock(args), size, size, 1e-5, **options)
    head.update(nn.utils.tree_map(lambda p: p * 3 if p.ndim == 2 else p, head.parameters()))
    mx.eval(head.parameters())
    head.bind(model)
    return head


class TableHead(DraftHead):
    """Guesses by the token alone: what follows each is in a table. Its cache is written as that of any head.

    Attributes:
        following: (V,).
    """

    following: mx.array

    def __call__(self, tokens: mx.array, cache: Any = None, states: mx.array | None = None) -> mx.array:
        output = super().__call__(tokens, cache, states)
        return mx.concatenate([tokens[..., None].astype(output.dtype), 0 * output[..., 1:]], axis=-1)

    def logits(self, outputs: mx.array) -> mx.array:
        said = self.following[outputs[:, 0].astype(mx.int32)]
        return mx.where(mx.arange(self.tap.vocabulary) == said[:, None], 99.0, 0.0)


def bigram_head(model: nn.Module) -> TableHead:
    """A head that says what the model would say if it had read the last token alone: right now and then."""
    head = random_head(model, kind=TableHead)
    assert isinstance(head, TableHead)
    head.following = mx.argmax(model(mx.arange(head.tap.vocabulary)[:, None])[:, -1], axis=-1)
    mx.eval(head.following)
    return head


def trained_head(model: nn.Module) -> DraftHead:
    """A head that was trained for a tiny model, for a moment, on texts in characters."""
    characters = Tokenizer(WordLevel({chr(31 + i): i for i in range(VOCAB)}, unk_token=" "))
    characters.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FEW.items():
            patch.setattr(drafter, name, value)
        return drafter.train_drafter(model, PreTrainedTokenizerFast(tokenizer_object=characters), tokens=2000)


def calm(model: nn.Module, share: float = 0.03) -> nn.Module:
    """What it says next depends less on its layers' memory, and more on the last token."""
    parts: list[Any] = model.modules()
    for part in parts:
        for name in ("o_proj", "out_proj"):
            if name in part:
                part[name].weight = part[name].weight * share
    return model
