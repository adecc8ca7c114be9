"""Files of heads that draft: those of `train-drafter`, and where the head of a model is found.

D the hidden size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from msgspec import Meta

from mlx_kv.bundled import head_path
from mlx_kv.cache.checks import check_type
from mlx_kv.files import tensor_files
from mlx_kv.files.atomic_write import check_replaceable
from mlx_kv.files.serialization import model_fingerprint
from mlx_kv.files.tensor_files import Part, decode, read_json
from mlx_kv.mlxlm.eagle import eagle_head, is_eagle
from mlx_kv.mlxlm.heads import FORMATS, INDEX, DraftHead, files_with, set_weights, tensors_in
from mlx_kv.mlxlm.loading import fit_to_device, vocabulary_of
from mlx_kv.mlxlm.probe import architecture, check_model

FORMAT = "mlx-kv draft head 1"
SUFFIX = ".kvdraft.safetensors"
FIX = "make it again with mlx-kv train-drafter MODEL"


class HeadShape(Part):
    """The sizes of a head whose layer is llama's.

    Attributes:
        size: D.
        intermediate: of its MLP.
        vocabulary: tokens that it guesses.
    """

    size: Annotated[int, Meta(ge=1, le=2**20)]
    heads: Annotated[int, Meta(ge=1, le=2**12)]
    kv_heads: Annotated[int, Meta(ge=1, le=2**12)]
    head_dim: Annotated[int, Meta(ge=1, le=2**12)]
    intermediate: Annotated[int, Meta(ge=1, le=2**22)]
    vocabulary: Annotated[int, Meta(ge=1, le=2**24)]
    rope_theta: float = 10000.0
    eps: float = 1e-5

    @classmethod
    def of(cls, head: DraftHead) -> HeadShape:
        """Of a head that `make_head` has made."""
        layer: Any = head.layer
        args, guesses = layer.args, 0 if head.ids is None else head.ids.size
        sizes = args.hidden_size, args.num_attention_heads, args.num_key_value_heads, args.head_dim
        return cls(*sizes, args.intermediate_size, guesses, args.rope_theta, args.rms_norm_eps)

    def make_head(self) -> DraftHead:
        """A head with random weights, of no model yet."""
        args = llama.ModelArgs(
            "llama",
            self.size,
            1,
            self.intermediate,
            self.heads,
            self.eps,
            1,
            head_dim=self.head_dim,
            num_key_value_heads=self.kv_heads,
            rope_theta=self.rope_theta,
        )
        head = DraftHead(llama.TransformerBlock(args), self.size, self.size, self.eps)
        head.guess_only(mx.zeros((self.vocabulary,), mx.int32))
        return head


class Metadata(Part):
    format: str
    fingerprint: str  # of the model
    shape: str  # JSON
    details: str  # JSON


def save_draft_head(path: str | Path, head: DraftHead, model: nn.Module, *, force: bool = False) -> None:
    """Writes a head to a file, atomically.

    Args:
        path: usually `MODEL_NAME.kvdraft.safetensors` beside the directory of the model, where it is found.
        head: as `train_drafter` returns it.
        model: that it was trained for.
        force: also replace a file that is no head.

    Raises:
        ValueError: the folder does not exist, the file is no head, or the head is of another kind.
        OSError: it cannot be written.
    """
    check_type("path", path, str | os.PathLike, "give the name of a file")
    check_type("head", head, DraftHead, "give what train_drafter returns")
    check_model("model", model)
    if head.ids is None or not isinstance(head.layer, llama.TransformerBlock):
        raise ValueError("only heads of train_drafter are written to files: keep the files of this one")
    check_replaceable(path, is_draft_head, "draft head", force)
    shape = HeadShape.of(head)
    arrays: Any = dict(tree_flatten(head.parameters()))  # type: ignore[no-untyped-call]
    words = {
        "fingerprint": model_fingerprint(model),
        "shape": json.dumps(msgspec.structs.asdict(shape)),
        "format": FORMAT,
    }
    tensor_files.write(path, arrays | {"ids": head.ids}, words | {"details": json.dumps(head.details)})


def is_draft_head(path: Path) -> bool:
    """Whether a file is a head of `save_draft_head`, complete or cut off."""
    return tensor_files.has_format(path, FORMAT)


def _read_head(path: Path, model: nn.Module, whole: bool) -> DraftHead:
    """The head in a file of `save_draft_head`.

    Raises:
        ValueError: it is none, was damaged, or is of another model.
    """
    file = tensor_files.read(path)
    if file.words.get("format") != FORMAT:
        raise ValueError(f"{path} is no head that drafts: {FIX}")
    try:
        metadata = decode(file.words, Metadata)
        shape, arrays = decode(read_json(metadata.shape), HeadShape), dict(file.arrays)
        details = decode(read_json(metadata.details), dict[str, Any])
        if shape.heads % shape.kv_heads or not shape.rope_theta > 0 or any(".scales" in name for name in arrays):
            raise ValueError("it has sizes or weights that no such head has")
        head, ids = shape.make_head(), arrays.pop("ids", None)
        if ids is None or ids.shape != (shape.vocabulary,) or ids.dtype != mx.int32:
            raise ValueError("the tokens that it guesses are missing")
        lowest, highest = ids.min().tolist(), ids.max().tolist()
        if not 0 <= lowest <= highest < vocabulary_of(model):  # type: ignore[operator]
            raise ValueError("it guesses tokens that the model does not have")
        head.guess_only(ids)
        set_weights(head, arrays, str(path))
    except ValueError as error:
        raise ValueError(f"{path} was damaged ({error}): {FIX}") from error
    head.details.update(details)
    if whole and metadata.fingerprint != model_fingerprint(model):
        raise ValueError(f"{path} is a head of another model: run mlx-kv train-drafter MODEL")
    return head


# --- places -----------------------------------------------------------------------------------------------------------


def load_draft_head(path_or_hub_id: str | Path, model: nn.Module, *, whole: bool = True) -> DraftHead:
    """Loads a head that drafts for a model, for `draft_model=` of all functions that generate.

    Args:
        path_or_hub_id: a file of `mlx-kv train-drafter`; or a directory or a repository with a head of this model: the
            model's own, of which only the files with the head are read, one of mlx-vlm's `split_mtp`, or of EAGLE-3;
            `reference` is the head of the bundled model.
        model: as `load` returns it.
        whole: False for a part of a model, of which it is not checked that the head was trained for it.

    Raises:
        ValueError: there is no head of this model.

    Example:
        >>> head = load_draft_head("Qwen/Qwen3-Next-80B-A3B-Instruct", model)  # doctest: +SKIP
        >>> speculative_generate(model, head, tokenizer, "Hello")  # doctest: +SKIP
    """
    check_model("model", model)
    check_type("path_or_hub_id", path_or_hub_id, str | os.PathLike, "give a file, a directory or a hub id")
    path = head_path(path_or_hub_id)
    if path.is_file():
        return _bound(_read_head(path, model, whole), partial(_read_again, path), model)
    folder = path if path.is_dir() else _downloaded(str(path_or_hub_id), _prefixes(model))
    if (head := _find_in(folder, model)) is None:
        raise ValueError(f"{path_or_hub_id} has no head that drafts for {architecture(model)}: {FIX_NONE}")
    return head


def _bound(head: DraftHead, reload: Callable[[], DraftHead], model: nn.Module) -> DraftHead:
    fit_to_device(head)
    head.bind(model)
    head.reload = reload
    return head


def _read_again(path: Path) -> DraftHead:
    """The head in a file that was read before; its weights are read when they are used."""
    words = tensor_files.read_metadata(path) or {}
    head = decode(read_json(words["shape"]), HeadShape).make_head()
    arrays: Any = mx.load(str(path))
    head.load_weights([(name, array) for name, array in arrays.items() if name != "ids"])
    fit_to_device(head)
    return head


def _find_in(folder: Path, model: nn.Module) -> DraftHead | None:
    def again() -> DraftHead:
        head = _head_in(folder, model)
        assert head is not None, "it was there before"
        fit_to_device(head)
        return head

    head = _head_in(folder, model)
    return None if head is None else _bound(head, again, model)


FIX_NONE = "give the repository that the model was made from, or train one with mlx-kv train-drafter"


def find_draft_head(model_path: str | Path, model: nn.Module, *, whole: bool = True) -> DraftHead | None:
    """The head of a model: that of `train-drafter` beside its directory, or the one in its files; None without any."""
    folder = Path(model_path)
    if not folder.is_dir():
        return None
    trained = head_file(folder)
    if is_draft_head(trained):
        return load_draft_head(trained, model, whole=whole)
    return _find_in(folder, model)


def head_file(folder: Path) -> Path:
    """The file of `train-drafter` for the model of a directory: beside it, where no loader takes it for weights."""
    real = Path(os.path.abspath(folder))
    return real.with_name(real.name + SUFFIX)


def _head_in(folder: Path, model: nn.Module) -> DraftHead | None:
    """The head in the files of a directory; None if there is none."""
    config = _config(folder)
    if is_eagle(config):
        return eagle_head(folder, config, model)
    kind = architecture(model)
    if kind not in FORMATS.names():
        return None
    prefixes = ("",) if str(config.get("model_type", "")).endswith("_mtp") else _prefixes(model)
    stored = tensors_in(folder, prefixes)
    return None if stored is None else FORMATS.find(kind)(model, stored)


def _config(folder: Path) -> dict[str, Any]:
    """The config.json of a directory; empty without one."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def is_head_folder(folder: Path) -> bool:
    """Whether a directory has nothing but a head."""
    config = _config(folder)
    return is_eagle(config) or str(config.get("model_type", "")).endswith("_mtp")


def _prefixes(model: nn.Module) -> tuple[str, ...]:
    """Of the tensors of a head in the files of a model of this kind; none where no head is known."""
    kind = architecture(model)
    if kind not in FORMATS.names():
        return ()
    text: Any = getattr(model, "language_model", model)
    return tuple(each.format(n=text.args.num_hidden_layers) for each in FORMATS.find(kind).prefixes)


def _downloaded(hub_id: str, prefixes: Sequence[str]) -> Path:
    """The directory with the files of a repository in which its head is.

    Raises:
        ValueError: the repository cannot be read.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=["*.json", "*mtp*.safetensors"]))
        of_model = (folder / INDEX).exists() and not is_head_folder(folder)
        names = sorted({path.name for path in files_with(folder, prefixes)}) if of_model else ["*.safetensors"]
        return Path(snapshot_download(hub_id, allow_patterns=["*.json", *names]))
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{hub_id} is no directory, and cannot be read from the hub: {reason}") from error
