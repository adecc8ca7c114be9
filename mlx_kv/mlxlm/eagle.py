"""Heads of EAGLE-3: one layer whose attention reads embedded token and state side by side, over states of three layers.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test". Its output
before the last norm is what deeper guesses read as the state. It has an output head of its own, for frequent tokens.

B sequences, S tokens, D the hidden size of the head, W the width of the model's states.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama

from mlx_kv.mlxlm.heads import DraftHead, scattered, set_weights, tensors_in
from mlx_kv.mlxlm.loading import vocabulary_of
from mlx_kv.mlxlm.taps import HiddenTap

NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
RENAMED = {"midlayer.": "layer.", "layers.0.": "layer.", "model.midlayer.": "layer.", "model.layers.0.": "layer."}


class EagleLayer(nn.Module):
    """A layer of llama whose attention reads 2 D channels.

    Args:
        norm_first: whether what is added to is the state after its norm.
    """

    def __init__(self, args: llama.ModelArgs, norm_first: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        block: Any = llama.TransformerBlock(args)
        self.self_attn, self.mlp = block.self_attn, block.mlp
        for name in ("q_proj", "k_proj", "v_proj"):
            rows, width = self.self_attn[name].weight.shape
            self.self_attn[name] = nn.Linear(2 * width, rows, bias=args.attention_bias)
        self.input_layernorm, self.post_attention_layernorm = block.input_layernorm, block.post_attention_layernorm
        self.hidden_norm = nn.RMSNorm(args.hidden_size, args.rms_norm_eps)
        self._norm_first = norm_first

    def __call__(self, embedded: mx.array, states: mx.array, mask: Any, cache: Any) -> mx.array:
        normed = self.hidden_norm(states)
        both = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        x = (normed if self._norm_first else states) + self.self_attn(both, mask, cache)
        output: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return output


class EagleHead(DraftHead):
    """A head of EAGLE-3.

    Args:
        args: of its layer.
        hidden: the layers whose states it reads.
        width: W, of all of them together.
        guesses: the number of tokens that it guesses.
        own_embedding: rows of an embedding of its own; 0 where it uses the model's.
        norm_first: as of `EagleLayer`.
    """

    def __init__(
        self,
        args: llama.ModelArgs,
        hidden: tuple[int, ...],
        width: int,
        guesses: int,
        own_embedding: int = 0,
        norm_first: bool = False,
    ) -> None:
        size = args.hidden_size
        super().__init__(EagleLayer(args, norm_first), width, size, args.rms_norm_eps, hidden=hidden)
        for name in ("enorm", "hnorm"):
            self.pop(name)
        self.fc = nn.Linear(width, size, bias=False)
        self.lm_head = nn.Linear(size, guesses, bias=False)
        if own_embedding:
            self.embed_tokens = nn.Embedding(own_embedding, size)

    def embed(self, tokens: mx.array) -> mx.array:
        """(B, S, D) of tokens (B, S)."""
        embedded: mx.array = self.embed_tokens(tokens) if "embed_tokens" in self else self.tap.embed(tokens)
        return embedded

    def read(self, embedded: mx.array, states: mx.array, mask: Any, cache: Any) -> mx.array:
        if states.shape[-1] == self.width:
            states = self.fc(states)
        output: mx.array = self.layer(embedded, states, mask, cache)
        return output

    def logits(self, outputs: mx.array) -> mx.array:
        logits: mx.array = self.lm_head(self.norm(outputs))
        return logits if self._ids is None else scattered(logits, self._ids, self.tap.vocabulary)


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a head of EAGLE-3."""
    names = [*(config.get("architectures") or []), config.get("speculators_model_type"), config.get("model_type")]
    return any("eagle3" in str(name).lower().replace("-", "") for name in names)


def eagle_head(folder: Path, config: Mapping[str, Any], model: nn.Module) -> EagleHead:
    """The head of EAGLE-3 in a directory.

    Raises:
        ValueError: it is not whole, or of another model.
    """
    stored = tensors_in(folder, ("",))
    if stored is None:
        raise ValueError(f"{folder} has no safetensors file: give the directory of a head, with its weights")
    tensors = {}
    for name, tensor in stored.tensors.items():
        begins = next((each for each in RENAMED if name.startswith(each)), "")
        tensors[RENAMED.get(begins, "") + name.removeprefix(begins)] = tensor
    for setting in ("norm_before_fc", "fc_norm", "use_aux_norm", "norm_output", "logit_scale"):
        if config.get(setting) or (config.get("eagle_config") or {}).get(setting):
            raise ValueError(f"{folder} is a head of EAGLE-3 with {setting}, which is not known here: give another one")
    layer = {**config, **(config.get("transformer_layer_config") or {})}
    rope = layer.get("rope_parameters") or {}
    layer["rope_theta"] = rope.get("rope_theta") or layer.get("rope_theta") or 10000.0
    scaled = rope.get("rope_type", "default") != "default"
    layer["rope_scaling"] = layer.get("rope_scaling") or (rope if scaled else None)
    make_args: Any = llama.ModelArgs.from_dict
    if missing := [name for name in NEEDED if not isinstance(layer.get(name), int)]:
        raise ValueError(f"{folder} has a config.json without {missing[0]}: give the directory of a whole head")
    args = make_args({**layer, "model_type": "llama", "num_hidden_layers": 1, "layer_types": None})
    text: Any = getattr(model, "language_model", model)
    hidden = layers_of(config, text.args.num_hidden_layers)
    vocabulary, width = vocabulary_of(model), HiddenTap(model, hidden).width
    offsets, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    guesses = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else vocabulary
    own = tensors["embed_tokens.weight"].shape[0] if "embed_tokens.weight" in tensors else 0
    norm_first = bool(config.get("norm_before_residual", "speculators_model_type" in config))
    head = EagleHead(args, hidden, width, guesses, own, norm_first)
    if guesses < vocabulary:
        if offsets is None or offsets.shape != (guesses,):
            raise ValueError(
                f"{folder} guesses {guesses} of {vocabulary} tokens, and does not say which: d2t is missing"
            )
        ids = mx.arange(guesses) + offsets.astype(mx.int32)
        lowest, highest = ids.min().tolist(), ids.max().tolist()
        if not 0 <= lowest <= highest < vocabulary:  # type: ignore[operator]
            raise ValueError(f"{folder} guesses tokens that the model does not have: give a head of this model")
        head.guess_only(ids)
    elif guesses > vocabulary:
        raise ValueError(f"{folder} guesses {guesses} tokens, the model has {vocabulary}: give a head of this model")
    set_weights(head, tensors, str(folder))
    return head


def layers_of(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The layers whose outputs a head reads, by its configuration and the number of the model's layers.

    Numbers in a file are those of the layer that reads a state, so of the one after; in a nested `eagle_config` that
    begins with 1, as SpecForge writes it, they are those of the layer that returns it.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    nested = (config.get("eagle_config") or {}).get(name)
    ids = config.get(name) or nested or (2, layers // 2, layers - 3)
    before = 0 if nested and not config.get(name) and ids[0] == 1 else 1
    return tuple(int(number) - before for number in ids)
