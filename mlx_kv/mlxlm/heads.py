"""Heads that draft: a layer or two which guess a model's next tokens from its hidden states, over layers of mlx-lm.

At each place a head reads a token and the model's state at the token before, and guesses the token after; deeper
guesses read the head's own output in the place of the state. It uses the model's embedding and output head. A head
comes with the files of its model (multi-token prediction: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section
2.2), in a folder of its own, or from `mlx-kv train-drafter`.

B sequences, S tokens, D the hidden size, W the width of the states that a head reads, V the vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import cache as stock
from mlx_lm.models.base import create_attention_mask

from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.taps import Hidden, HiddenTap
from mlx_kv.policy import CachePolicy
from mlx_kv.settings import OpenSet, SettingError

Tensors = dict[str, mx.array]
INDEX = "model.safetensors.index.json"
BLOCK = 128  # rows and columns of a weight in 8 bits that share a scale


class DraftHead(nn.Module):
    """One layer behind a projection of embedded token and state.

    y = norm(layer(fc([enorm(embedding of the token), hnorm(state)]))), which the output head turns into logits.

    Args:
        layer: called with x (B, S, D), a mask and its cache.
        width: W.
        size: D.
        eps: of its norms.
        make_cache: makes the cache of the layer.
        hidden: the states that it reads.
        hidden_first: whether the state comes first in the projection.
        array_masks: whether the layer reads masks as arrays only.

    Attributes:
        tap: of the model that it belongs to.
    """

    def __init__(
        self,
        layer: nn.Module,
        width: int,
        size: int,
        eps: float,
        make_cache: Callable[[], Any] = stock.KVCache,
        hidden: Hidden = "final",
        hidden_first: bool = False,
        array_masks: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.enorm, self.hnorm = nn.RMSNorm(size, eps), nn.RMSNorm(width, eps)
        self.fc = nn.Linear(size + width, size, bias=False)
        self.layer, self.norm = layer, nn.RMSNorm(size, eps)
        self.hidden, self.width, self.hidden_first, self._make_cache = hidden, width, hidden_first, make_cache
        self._array_masks = array_masks
        self.tap: HiddenTap
        self._ids: mx.array | None = None  # no weight, as its name tells MLX
        self._rows: mx.array | None = None  # (n, D), of the model's output head
        self._details: dict[str, Any] = {}
        self.reload: Callable[[], DraftHead] | None = None  # reads the same head again

    @property
    def ids(self) -> mx.array | None:
        """(n,), the tokens that it guesses, in the order of its own logits; None are all of the model's."""
        return self._ids

    def guess_only(self, ids: mx.array) -> None:
        """Makes it guess these tokens (n,) alone; called before `bind`."""
        self._ids = ids

    @property
    def details(self) -> dict[str, Any]:
        """Of its training, for people."""
        return self._details

    def bind(self, model: nn.Module) -> None:
        """Makes it a head of a model.

        Raises:
            ValueError: the model has other states, or no embedding or output head that could be found.
        """
        self.tap = tap = HiddenTap(model, self.hidden)
        embedded = self.embed(mx.array([[0]])).shape[-1]
        if tap.width != self.width or embedded != self.norm.weight.shape[0]:
            raise ValueError(
                f"this head reads states of {self.width} and embeddings of {self.norm.weight.shape[0]} channels, the "
                f"model has {tap.width} and {embedded}: give a head of this model"
            )
        self._rows = None

    def release(self) -> None:
        """Frees the weights; they are read from where they came when they are next used."""
        if self.reload is not None:
            self.update(self.reload().parameters())  # type: ignore[no-untyped-call]
        self._rows = None

    def make_cache(self) -> list[Any]:
        """As of mlx-lm's models: the cache of its layer."""
        return [self._make_cache()]

    def __call__(
        self, tokens: mx.array, cache: Sequence[Any] | None = None, states: mx.array | None = None
    ) -> mx.array:
        """Its output (B, S, D), which deeper guesses read as states.

        Args:
            tokens: (B, S).
            states: (B, S, W or D), of the token before each; None are zeros, as before the first token.
        """
        embedded = self.embed(tokens)
        if states is None:
            states = mx.zeros((*tokens.shape, self.width), embedded.dtype)
        layer_cache = None if cache is None else cache[0]
        first = layer_cache[0] if isinstance(layer_cache, stock.CacheList) else layer_cache
        mask = create_attention_mask(embedded, first, return_array=self._array_masks)
        return self.read(embedded, states, mask, layer_cache)

    def embed(self, tokens: mx.array) -> mx.array:
        """(B, S, D) of tokens (B, S)."""
        return self.tap.embed(tokens)

    def read(self, embedded: mx.array, states: mx.array, mask: Any, cache: Any) -> mx.array:
        """Its output (B, S, D) for embedded tokens (B, S, D) and states."""
        parts = [self.enorm(embedded), self.hnorm(states)]
        x = self.fc(mx.concatenate(parts[::-1] if self.hidden_first else parts, axis=-1))
        output: mx.array = self.norm(self.layer(x, mask, cache))
        return output

    def logits(self, outputs: mx.array) -> mx.array:
        """Logits (B, V) of what comes next, by its outputs (B, D)."""
        if self._ids is None:
            return self.tap.project(outputs)
        return scattered(outputs @ self.output_rows().T, self._ids, self.tap.vocabulary)

    def output_rows(self) -> mx.array:
        """(n, D): the rows of the model's output head for the tokens that it guesses."""
        if self._rows is None:
            assert self._ids is not None
            self._rows = self.tap.output_rows(self._ids)
            mx.eval(self._rows)  # or its graph would keep the whole output head
        return self._rows


def scattered(logits: mx.array, ids: mx.array, vocabulary: int) -> mx.array:
    """Logits (B, V) by those (B, n) of some tokens (n,); the others are not guessed."""
    full = mx.full((logits.shape[0], vocabulary), -mx.inf, logits.dtype)
    full[:, ids] = logits
    return full


def head_policy(head: DraftHead, policy: CachePolicy, max_rollback: int) -> CachePolicy:
    """How the keys and values of a head are kept: as the model's, but plain where its sizes are none for their codecs.

    Args:
        policy: of the model.
        max_rollback: tokens that its cache can take back.
    """
    own = policy.beside_model(max_rollback)
    try:
        make_prompt_cache(head, own, strict=False)
    except SettingError:
        return own.plain()
    return own


# --- heads in the files of their models -------------------------------------------------------------------------------


class HeadFormat(NamedTuple):
    """How the files of a family of models name the parts of the head, and of what layers it is made.

    Attributes:
        prefixes: of its tensors; {n} is the number of the model's layers.
        names: of its tensors, without the prefix, to those of a `DraftHead`; by their beginnings, the first that fits.
            Others are not needed.
        like: which of the model's layers the head's is like, by the model's arguments.
        hidden_first: as of `DraftHead`.
        before_norm: whether the state is that before the model's last norm.
        centred: whether 1 is to be added to the weights of norms, in files that mlx-lm or mlx-vlm have not written.
    """

    prefixes: tuple[str, ...]
    names: dict[str, str]
    like: Callable[[Any], int]
    hidden_first: bool = False
    before_norm: bool = False
    centred: bool = False

    def __call__(self, model: nn.Module, stored: HeadTensors) -> DraftHead:
        """The head of a model with stored weights.

        Raises:
            ValueError: tensors are missing, or have other shapes.
        """
        text: Any = getattr(model, "language_model", model)
        layers: Any = model.layers
        args, number = text.args, self.like(text.args)
        made: list[Any] = stock.make_prompt_cache(model)
        place = min(number, len(layers) - 1)
        if len(layers) < args.num_hidden_layers:  # a part of a model: any layer with attention
            place = next((i for i, layer in enumerate(layers) if "self_attn" in layer), 0)
        like = layers[place]
        numbered = len(inspect.signature(type(like)).parameters) > 1
        layer = type(like)(args, number) if numbered else type(like)(args)
        recurrent = isinstance(made[place], stock.ArraysCache)
        make_cache = stock.KVCache if recurrent else partial(copy.deepcopy, made[place])
        size = args.hidden_size
        hidden: Hidden = (args.num_hidden_layers - 1,) if self.before_norm else "final"
        head = DraftHead(layer, size, size, args.rms_norm_eps, make_cache, hidden, self.hidden_first, True)
        set_weights(head, self._renamed(model, stored), stored.name, like)
        return head

    def _renamed(self, model: nn.Module, stored: HeadTensors) -> Tensors:
        """The tensors by the names of a `DraftHead`, in mlx-lm's form."""
        renamed: Tensors = {}
        for name, tensor in stored.tensors.items():
            for begins, ours in self.names.items():
                if name.startswith(begins) and not name.endswith("inv_freq"):
                    renamed[ours + name.removeprefix(begins)] = tensor
                    break
        renamed = with_experts_joined(without_fp8(renamed))
        # mlx-lm's own code for the files of a model splits projections, of a layer like any other.
        matrices = {name: x for name, x in renamed.items() if name.startswith("layer.") and x.ndim > 1}
        sanitize: Any = getattr(model, "sanitize", dict)
        sanitized = sanitize({"model.layers.0." + name.removeprefix("layer."): x for name, x in matrices.items()})
        joined = {"layer." + name.partition("layers.0.")[2]: x for name, x in sanitized.items()}
        vectors = {name: x for name, x in renamed.items() if name not in matrices}
        converted = any(name.endswith(".scales") or "switch_mlp" in name for name in stored.tensors)
        if self.centred and stored.original and not converted:
            vectors |= {name: x + 1.0 for name, x in vectors.items() if name.endswith("norm.weight") and x.ndim == 1}
        return vectors | joined


class HeadTensors(NamedTuple):
    """The tensors of a head, without the prefix of their names.

    Attributes:
        name: of the file or folder.
        original: whether another program than mlx-lm and mlx-vlm wrote them.
    """

    tensors: Tensors
    name: str
    original: bool


OF_LAYER = {part: f"layer.{part}" for part in ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")}
QWEN = HeadFormat(
    ("mtp.", "model.mtp.", "language_model.mtp."),
    {"pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm.", "fc.": "fc.", "norm.": "norm."}
    | {"layers.0.": "layer."},
    lambda args: args.full_attention_interval - 1,
    centred=True,
)
DEEPSEEK = HeadFormat(
    ("model.layers.{n}.",),
    {"enorm.": "enorm.", "hnorm.": "hnorm.", "eh_proj.": "fc.", "shared_head.norm.": "norm."} | OF_LAYER,
    lambda args: args.num_hidden_layers,
)
MIMO = HeadFormat(
    ("model.mtp_layers.0.",),
    {"token_layernorm.": "enorm.", "hidden_layernorm.": "hnorm.", "input_proj.": "fc.", "final_layernorm.": "norm."}
    | OF_LAYER,
    lambda args: args.num_hidden_layers,
    hidden_first=True,
    before_norm=True,
)
OURS: dict[str, HeadFormat] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), QWEN),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite"), DEEPSEEK),
    "mimo": MIMO,
}
FORMATS: OpenSet[HeadFormat] = OpenSet("head_format", "the architecture of a model with a head", OURS)


EXPERT = re.compile(r"layer\.mlp\.experts\.(\d+)\.(\w+\.\w+)")


def with_experts_joined(tensors: Mapping[str, mx.array]) -> Tensors:
    """Tensors of which all experts are one, as mlx-lm has them."""
    joined, experts = dict(tensors), dict[str, dict[int, mx.array]]()
    for name in tensors:
        if (expert := EXPERT.fullmatch(name)) is not None:
            experts.setdefault(f"layer.mlp.switch_mlp.{expert[2]}", {})[int(expert[1])] = joined.pop(name)
    return joined | {name: mx.stack([each[i] for i in sorted(each)]) for name, each in experts.items()}


def without_fp8(tensors: Mapping[str, mx.array]) -> Tensors:
    """Tensors of which none is in 8 bits with a scale for each block."""
    plain = {name: x for name, x in tensors.items() if not name.endswith("_scale_inv")}
    for name, scale in tensors.items():
        if name.endswith("_scale_inv"):
            if scale.ndim != 2 or plain.get(name.removesuffix("_scale_inv"), scale).ndim != 2:
                raise ValueError(f"{name} is no scale of blocks of a matrix")
            weight = mx.from_fp8(plain[name.removesuffix("_scale_inv")], dtype=mx.bfloat16)
            rows, columns = weight.shape
            scales = mx.repeat(mx.repeat(scale, BLOCK, axis=0)[:rows], BLOCK, axis=1)[:, :columns]
            plain[name.removesuffix("_scale_inv")] = (weight * scales).astype(mx.bfloat16)
    return plain


def set_weights(head: DraftHead, tensors: Tensors, name: str, like: nn.Module | None = None) -> None:
    """Sets all weights of a head.

    Args:
        name: of the file or folder.
        like: a layer of the model. Where nothing is stored quantised, those parts of the head's layer become so whose
            counterparts are; norms and `fc` stay as they are.

    Raises:
        ValueError: weights are missing, or have other shapes.
    """
    stored = {key.removesuffix(".scales") for key in tensors if key.endswith(".scales")}

    if any(tensors[f"{path}.scales"].ndim == 0 or 0 in tensors[f"{path}.scales"].shape for path in stored):
        raise ValueError(f"{name} has scales of another shape")

    def as_stored(path: str, module: Any) -> bool | dict[str, int]:
        if path not in stored or not hasattr(module, "to_quantized"):
            return False
        width = module.weight.shape[-1]
        group_size = width // tensors[path + ".scales"].shape[-1]
        return {"group_size": group_size, "bits": tensors[path + ".weight"].shape[-1] * 32 // width}

    nn.quantize(head, class_predicate=as_stored)
    wanted: Any = dict(tree_flatten(head.parameters()))  # type: ignore[no-untyped-call]
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise ValueError(f"{name} has no whole head of this model: {missing[0]} is missing, of {len(missing)}")
    for key, weight in wanted.items():
        if tensors[key].shape != weight.shape:
            raise ValueError(f"{name}: {key} has the shape {tensors[key].shape}, this model needs {weight.shape}")
        if mx.issubdtype(weight.dtype, mx.floating) != mx.issubdtype(tensors[key].dtype, mx.floating):
            raise ValueError(f"{name}: {key} is {tensors[key].dtype}, a form of weights that is not known here")
    if unknown := sorted(tensors.keys() - wanted.keys()):
        raise ValueError(f"{name} has a head of a kind that is not known here: {unknown[0]} is no weight of it")
    head.load_weights([(key, tensors[key]) for key in wanted])
    parts: Any = {} if like is None or stored else dict(like.named_modules())  # type: ignore[no-untyped-call]

    def as_like(path: str, module: Any) -> bool | dict[str, Any]:
        part = parts.get(path)
        if part is None or "scales" not in part:
            return False
        return {"group_size": part.group_size, "bits": part.bits, "mode": part.mode}

    nn.quantize(head.layer, class_predicate=as_like)


def tensors_in(folder: Path, prefixes: Sequence[str]) -> HeadTensors | None:
    """The tensors with one of these prefixes in the safetensors files of a folder; None if there are none."""
    tensors: Tensors = {}
    original = True
    for path in files_with(folder, prefixes):
        try:
            read: Any = mx.load(str(path), return_metadata=True)
        except RuntimeError as error:
            raise ValueError(f"{path} cannot be read ({error}): give the files of a head") from error
        loaded, metadata = read
        for name, tensor in loaded.items():
            if (prefix := next((each for each in prefixes if name.startswith(each)), None)) is not None:
                tensors[name.removeprefix(prefix)] = tensor
                original = metadata.get("format") != "mlx"
    return HeadTensors(tensors, str(folder), original) if tensors else None


def files_with(folder: Path, prefixes: Sequence[str]) -> Iterator[Path]:
    """The safetensors files of a folder that may have such tensors, by its index if it has one."""
    try:
        names: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError):
        yield from sorted({*folder.glob("*.safetensors"), *folder.glob("mtp/*.safetensors")})
        return
    yield from sorted({folder / file for name, file in names.items() if name.startswith(tuple(prefixes))})
    yield from sorted({*folder.glob("*mtp*.safetensors"), *folder.glob("mtp/*.safetensors")})
