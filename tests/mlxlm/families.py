"""Every model file of mlx-lm as a tiny model: nothing to download, milliseconds to build.

Attention here decides something: a model whose answer does not hang on its early tokens would hide a cache that lost
them.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from effort import THOROUGH
from family_configurations import CONFIGURATIONS
from family_parts import COMMON, VOCAB
from metal_stand_ins import STAND_INS
from mlx.utils import tree_map_with_path

HELPERS = {
    "activations": "functions of other files",
    "base": "functions of other files",
    "bitlinear_layers": "layers of bitnet",
    "cache": "the caches",
    "gated_delta": "a recurrence of other files",
    "mla": "layers of other files",
    "pipeline": "splits models over machines",
    "rope_utils": "functions of other files",
    "ssm": "a recurrence of other files",
    "switch_layers": "experts of other files",
}
# Biases of gates: so low that recurrent states forget slowly.
FORGETTING = ("dt_bias", "dt_proj.bias", "recurrent_param", "w_lora.lora.2.bias")


def model_files() -> list[str]:
    """The names of the files that mlx-lm has for models, those of helpers among them."""
    folder = Path(mlx_lm.models.__path__[0])
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def family_names() -> list[str]:
    return list(CONFIGURATIONS)


# One of each kind of attention, and what each once got wrong; all of them in the long suite.
SAMPLE = "plamo3 llama4 deepseek_v32 minimax_m3_vl afm7 nemotron-nas baichuan_m1 recurrent_gemma gpt_bigcode".split()
WALKED = family_names() if THOROUGH else SAMPLE


def configuration(name: str) -> dict[str, Any]:
    """What a config.json of this family would say."""
    changes = copy.deepcopy(CONFIGURATIONS[name])
    if "text" in changes:
        text = {**copy.deepcopy(COMMON), "model_type": f"{name}_text", **changes.pop("text")}
        return {"model_type": name, "vocab_size": VOCAB, "tie_word_embeddings": True, "text_config": text, **changes}
    return {**copy.deepcopy(COMMON), "model_type": name, **changes}


def make_family(name: str, seed: int = 0) -> nn.Module:
    """A model of this family in float32, with random weights that are the same for the same seed."""
    # olmo looks for this package when it is imported, and uses nothing of it.
    sys.modules.setdefault("hf_olmo", ModuleType("hf_olmo"))
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(seed)
    if not mx.metal.is_available():
        for function, stand_in in STAND_INS.get(name, {}).items():
            setattr(module, function, stand_in)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(configuration(name)))

    def spread(path: str, weight: mx.array) -> mx.array:
        """Matrices are made larger, so that attention is not nearly uniform; what starts as a constant gets noise."""
        key = mx.random.key(seed + zlib.crc32(path.encode()))
        if not mx.issubdtype(weight.dtype, mx.floating):
            return mx.random.randint(0, 2 ** (8 * weight.dtype.size - 1), weight.shape, weight.dtype, key)  # packed
        weight, noise = weight.astype(mx.float32), mx.random.normal(weight.shape, key=key)
        if path.endswith(FORGETTING):
            return weight - 4 + noise
        if weight.ndim == 2 and mx.var(weight).item() > 0:
            return 3 * weight
        return weight + 0.1 * noise

    model.update(tree_map_with_path(spread, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


@functools.cache
def shared_family(name: str, seed: int = 0) -> nn.Module:
    """One for all tests of a process that leave it as it is; what it was asked once, it need not be asked again."""
    return make_family(name, seed)
