"""Models of mlx-lm: loaded with their weights, or made of a configuration alone; and a model's name, sizes and limits.

mlx-lm's loader is imported when it is called: it brings the tokenizers.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_kv.cache.checks import check_type
from mlx_kv.mlxlm.cpu import use_cpu_activation, use_cpu_attention, use_cpu_head
from mlx_kv.mlxlm.cuda import use_cuda_attention
from mlx_kv.mlxlm.probe import cached_per_model, check_not_forked
from mlx_kv.mlxlm.vision import FAMILIES, load_vision, with_images


def load(
    path_or_hub_id: str | Path,
    *,
    adapter_path: str | Path | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    quantize_activations: bool = False,
    lazy: bool = False,
    images: bool = True,
) -> tuple[nn.Module, Any]:
    """Loads a model and its tokenizer with mlx-lm, or with mlx-vlm one whose images mlx-lm does not read.

    On a CPU 16-bit weights become float32: it emulates half precision.

    Args:
        adapter_path: of weights that were trained beside the model's (LoRA), as `mlx_lm.lora` writes them.
        trust_remote_code: run code that comes with the model or its tokenizer.
        chat_template: instead of the tokenizer's own.
        quantize_activations: as the weights are, where a layer can.
        lazy: read each weight on first use.
        images: False loads the text part alone, with mlx-lm, of a model that could read images; of one of mlx-vlm, so
            do `adapter_path` and `quantize_activations`.

    Raises:
        ValueError: a directory that holds no model, a name that mlx-lm cannot load, or a template that is no Jinja.
        TypeError: something else than a path or a name.
        RuntimeError: as `check_not_forked`.
    """
    check_not_forked()
    check_type("path_or_hub_id", path_or_hub_id, str | os.PathLike, "give a directory or a hub id")
    template = {} if chat_template is None else {"chat_template": chat_template}
    options: dict[str, Any] = {
        "adapter_path": None if adapter_path is None else str(adapter_path),
        "trust_remote_code": trust_remote_code,
        "tokenizer_config": {"trust_remote_code": trust_remote_code, **template},
        "model_config": {"quantize_activations": True} if quantize_activations else None,
    }
    loaded = None
    if images and adapter_path is None and not quantize_activations:
        loaded = _load_with_images(path_or_hub_id, lazy, trust_remote_code, options["tokenizer_config"])
    if loaded is None:
        model, tokenizer, config = load_with_config(path_or_hub_id, lazy=lazy, **options)
        loaded = (with_images(model, tokenizer, config) if images else model), tokenizer
    model, tokenizer = loaded
    fit_to_device(model)
    if chat_template is not None:
        _check_template(tokenizer)
    return model, tokenizer


def _load_with_images(
    path_or_hub_id: str | Path, lazy: bool, trust_remote_code: bool, tokenizer_config: dict[str, Any]
) -> tuple[nn.Module, Any] | None:
    """A model of mlx-vlm and its tokenizer; None where mlx-lm reads the model's text alone.

    A warning says so where it should have been read with images.
    """
    config = _config_with_images(path_or_hub_id)
    if "vision_config" not in config:
        return None
    from mlx_lm.tokenizer_utils import load as load_tokenizer

    if config.get("model_type") not in FAMILIES:
        return None
    try:
        folder, model = load_vision(path_or_hub_id, trust_remote_code=trust_remote_code)
    except ValueError as error:
        warnings.warn(f"text alone, without images: {error}", stacklevel=3)
        return None
    if not lazy:
        mx.eval(weights_of(model))
    if "chat_template" not in tokenizer_config and (own := getattr(model.processor, "chat_template", None)):
        tokenizer_config = {**tokenizer_config, "chat_template": own}
    ends = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    tokenizer = load_tokenizer(folder, tokenizer_config, eos_token_ids=ends)
    _take_texts(tokenizer)
    return model, tokenizer


# Templates of some of these models take contents that are lists of parts, and drop those that are texts.
TAKES_PARTS = """
{%- set taken = namespace(all=[]) -%}
{%- for message in messages -%}
  {%- if message["content"] is string -%}
    {%- set taken.all = taken.all + [dict(message, content=[{"type": "text", "text": message["content"]}])] -%}
  {%- else -%}
    {%- set taken.all = taken.all + [message] -%}
  {%- endif -%}
{%- endfor -%}
{%- set messages = taken.all -%}
"""


def _take_texts(tokenizer: Any) -> None:
    """Has a chat template take texts, too, where it takes only lists of parts."""

    def shown(content: Any) -> bool:
        try:
            text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        except Exception:  # templates raise what they like
            return False
        return "wombat" in text

    if tokenizer.chat_template is None or shown("wombat") or not shown([{"type": "text", "text": "wombat"}]):
        return
    tokenizer.chat_template = "".join(line.strip() for line in TAKES_PARTS.splitlines()) + tokenizer.chat_template


def _config_with_images(path_or_hub_id: str | Path) -> dict[str, Any]:
    """The config.json of a model, with the tokens that end a text; empty where mlx-vlm or the file is missing."""
    if importlib.util.find_spec("mlx_vlm") is None:
        return {}
    path = Path(path_or_hub_id) / "config.json"
    try:
        if not Path(path_or_hub_id).is_dir():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(str(path_or_hub_id), "config.json"))
        config = json.loads(path.read_text(encoding="utf-8"))
    except Exception:  # mlx-lm says what is wrong
        return {}
    if not isinstance(config, dict):
        return {}
    ends = generation_config(path_or_hub_id).get("eos_token_id")
    return config if ends is None else config | {"eos_token_id": ends}


def _check_template(tokenizer: Any) -> None:
    """Raises ValueError for a chat template that is no Jinja; one that refuses this chat may take others."""
    from jinja2 import TemplateSyntaxError

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template is no Jinja: line {error.lineno}: {error.message}; correct it") from None
    except Exception:
        pass


def release_weights(model: nn.Module, load: Callable[[], nn.Module]) -> None:
    """Replaces the weights of a model by weights that are not read yet, which frees the old ones.

    Args:
        load: loads the same model lazily.
    """
    model.update(load().parameters())  # type: ignore[no-untyped-call]
    mx.clear_cache()


def fit_to_device(model: nn.Module) -> None:
    """On a CPU, 16-bit weights become float32: half precision is emulated there. The rest is in `cpu` and `cuda`."""
    if mx.default_device().type == mx.DeviceType.cpu:
        model.set_dtype(mx.float32)
    use_cpu_attention(model)
    use_cpu_activation(model)
    use_cpu_head(model)
    use_cuda_attention(model)


def load_with_config(path_or_hub_id: str | Path, lazy: bool, **options: Any) -> tuple[nn.Module, Any, dict[str, Any]]:
    """A model as it is stored, its tokenizer and its configuration, by mlx-lm.

    Args:
        lazy: read each weight on first use.
        options: of mlx-lm's `load`.

    Raises:
        ValueError: as `load`.
    """
    from mlx_lm import load as stock_load

    check_type("path_or_hub_id", path_or_hub_id, str | os.PathLike, "give a directory or a hub id")
    path = Path(path_or_hub_id)
    if path.is_dir() and not (path / "config.json").exists():
        raise ValueError(f"{path} has no config.json: give a directory with a model that mlx-lm can load")
    if path.is_file():
        raise ValueError(f"{path} is a file: give the directory of a model, with its config.json")
    if not path.exists() and (path.is_absolute() or len(path.parts) != 2):
        raise ValueError(f"{path} is neither a directory nor a hub id such as mlx-community/Qwen3-0.6B-4bit")
    try:
        return stock_load(str(path_or_hub_id), lazy=lazy, return_config=True, **options)  # type: ignore[return-value]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"mlx-lm cannot load {path_or_hub_id}: {reason[0]}") from error


def parse_config(text: str) -> Any:
    """The content of a config.json, as mlx-lm reads it: infinity and NaN are objects there that name them.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested too deeply.
    """

    def untagged(value: dict[str, Any]) -> Any:
        return float(str(value["__float__"])) if value.keys() == {"__float__"} else value

    return json.loads(text, object_hook=untagged)


def model_from_config(config: dict[str, Any], dtype: mx.Dtype) -> nn.Module:
    """The model of mlx-lm that a config.json describes, its weights lazy: never read, never made.

    Args:
        config: the content of a config.json. Its entries about quantised weights don't matter to keys and values.
        dtype: of the weights, and so of keys and values.

    Raises:
        ValueError: mlx-lm has no such model, or the configuration lacks what the model needs.
    """
    from mlx_lm.utils import load_model

    # The function that finds the class for a model type is private; load_model documents it as a default.
    get_model_classes = inspect.signature(load_model).parameters["get_model_classes"].default
    if config.get("model_file") is not None:
        raise ValueError(
            f"this config.json needs code of its own ({config['model_file']}), which is not run: give one of mlx-lm's"
        )
    if not isinstance(config.get("model_type"), str):
        raise ValueError('this config.json has no "model_type": give that of a model that mlx-lm can load')
    try:
        model_class, arguments = get_model_classes(config)
        model: nn.Module = model_class(arguments.from_dict(config))
        model.set_dtype(dtype)
    except Exception as error:  # the constructors of a hundred models, with a configuration that may be anything
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"mlx-lm cannot build a model from this config.json: {reason}") from error
    return model


@cached_per_model
def number_of_weights(model: nn.Module) -> int:
    """The number of weights of all layers; packed ones count as the weights that they encode."""
    from mlx_lm.utils import get_total_parameters

    return int(get_total_parameters(model))  # type: ignore[no-untyped-call]


@cached_per_model
def layer_weights(model: nn.Module) -> int:
    """The number of weights that a prompt meets: all but the embedding's and, where there is one, the output head's."""
    from mlx_lm.utils import get_total_parameters

    tables, layers = (nn.Embedding, nn.QuantizedEmbedding), (nn.Linear, nn.QuantizedLinear)
    every: list[Any] = model.modules()  # type: ignore[no-untyped-call]
    modules = [each for each in every if isinstance(each, tables + layers)]
    vocabulary = max([each.weight.shape[0] for each in modules if isinstance(each, tables)], default=0)
    outside = nn.Sequential(*(each for each in modules if each.weight.shape[0] == vocabulary))  # type: ignore[no-untyped-call]
    return number_of_weights(model) - int(get_total_parameters(outside))  # type: ignore[no-untyped-call]


def weights_of(model: nn.Module) -> list[mx.array]:
    """All weights of a model, evaluated or not."""
    flat: Any = tree_flatten(model.parameters())  # type: ignore[no-untyped-call]
    return [weight for _, weight in flat]


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights of a model."""
    return sum(weight.nbytes for weight in weights_of(model))


@cached_per_model
def vocabulary_of(model: nn.Module) -> int:
    """How many tokens its logits are of. The graph is built for one token, and not evaluated."""
    return int(model(mx.array([[0]])).shape[-1])


def quantize_as_stored(model: nn.Module, config: dict[str, Any]) -> None:
    """Quantises the weights of a model of `model_from_config` as its configuration says, so that they have the bytes
    of its files. Layers that cannot be quantised stay as they are.
    """
    settings = config.get("quantization")
    if not isinstance(settings, dict):
        return
    size, bits, mode = settings.get("group_size", 64), settings.get("bits", 4), settings.get("mode", "affine")

    def how(path: str, module: Any) -> Any:
        if path in settings:
            return settings[path]
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % size == 0

    nn.quantize(model, group_size=size, bits=bits, mode=mode, class_predicate=how)


def generation_config(path_or_hub_id: str | Path) -> dict[str, Any]:
    """The content of the generation_config.json of a model that has been loaded from here; empty where it has none."""
    path = Path(path_or_hub_id) / "generation_config.json"
    if not Path(path_or_hub_id).is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(str(path_or_hub_id), path.name)  # mlx-lm has brought it with the rest
        if not isinstance(cached, str):
            return {}
        path = Path(cached)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def context_length(model: nn.Module) -> int | None:
    """The maximum number of positions in a model's configuration, if any."""
    args = getattr(model, "args", None)
    length = getattr(args, "max_position_embeddings", None)
    return length if isinstance(length, int) else None
