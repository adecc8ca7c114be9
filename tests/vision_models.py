"""Tiny random models of mlx-vlm's and mlx-lm's families, images for them, and the library's own way to read them.

V = 200 tokens, of which three are for images.
"""

from __future__ import annotations

import importlib
import json
import random
import string
import types
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from metal_stand_ins import STAND_INS
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import cache as stock

from mlx_kv.generation.images import ImagePrompt
from mlx_kv.mlxlm.vision import EmbeddingModel, Image, VisionLanguageModel

Parts = Sequence[Sequence[int] | Image]
VOCABULARY, IMAGE, START, END = 200, 190, 189, 188
TEXT = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
GRID = {"image_token_id": IMAGE, "video_token_id": 191, "vision_start_token_id": START, "vision_end_token_id": END}
EYES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_channels": 3}
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "smolvlm", "llava", "muse_spark")
SEVERAL_AXES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
WINDOWED = ("gemma3", "muse_spark")
OF_MLX_LM = ("muse_spark",)
MUSE: dict[str, Any] = {
    "post_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0},
    "layer_rope_theta": [10000.0, 10000.0, 0],
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 24,
    "head_dim": 32,
    "final_logit_softcapping": 20.0,
    "output_multiplier": 0.2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_hidden_size": 64,
    "moe_intermediate_size": 32,
}


def make_model(family: str, seed: int = 0, **sizes: Any) -> VisionLanguageModel:
    """A model of random weights, scaled so that what comes next depends on all that came before.

    Args:
        sizes: other settings of its text part.
    """
    if family in OF_MLX_LM:
        made = _with_weights(_model_of_mlx_lm(family, {**TEXT, **MUSE, **sizes}), seed)
        made.lm_head.weight[IMAGE] = 0.0  # no answer has a place of an image
        return EmbeddingModel(made)
    module: Any = importlib.import_module(f"mlx_vlm.models.{family}")
    text: dict[str, Any] = {"model_type": family, **TEXT, **sizes}
    eyes: dict[str, Any] = {"model_type": family, **EYES}
    more: dict[str, Any] = {"model_type": family, "vocab_size": VOCABULARY}
    if family in SEVERAL_AXES:
        text |= {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
        eyes = {"model_type": family, "depth": 2, "hidden_size": 32, "num_heads": 2, "in_channels": 3, "patch_size": 4}
        eyes |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "spatial_patch_size": 4}
        if family == "qwen2_vl":
            eyes |= {"embed_dim": 32, "hidden_size": text["hidden_size"], "mlp_ratio": 2}
        elif family == "qwen2_5_vl":
            eyes |= {
                "intermediate_size": 48,
                "out_hidden_size": text["hidden_size"],
                "window_size": 16,
                "fullatt_block_indexes": [1],
            }
        else:
            text |= {"head_dim": 32}
            eyes |= {"intermediate_size": 48, "out_hidden_size": text["hidden_size"], "num_position_embeddings": 64}
            eyes |= {"deepstack_visual_indexes": [0, 1]}
        more |= GRID
    elif family == "gemma3":
        text |= {"head_dim": 32, "sliding_window": 24, "sliding_window_pattern": 3, "query_pre_attn_scalar": 32}
        text |= {"mm_tokens_per_image": 4}
        for name in ("rope_theta", "tie_word_embeddings"):
            del text[name]
        eyes |= {"model_type": "siglip_vision_model", "patch_size": 4, "image_size": 16}
        more |= {"image_token_index": IMAGE, "hidden_size": 128}
    elif family == "llava":
        eyes |= {"model_type": "clip_vision_model", "patch_size": 4, "image_size": 16, "projection_dim": 32}
        text |= {"model_type": "llama"}
        more |= {"image_token_index": IMAGE}
    else:
        eyes |= {"model_type": f"{family}_vision" if family == "smolvlm" else family, "patch_size": 4, "image_size": 16}
        more |= {"image_token_id": IMAGE, "scale_factor": 2}
    config = module.ModelConfig(
        text_config=module.TextConfig(
            **{name: value for name, value in text.items() if _takes(module.TextConfig, name)}
        ),
        vision_config=module.VisionConfig(
            **{name: value for name, value in eyes.items() if _takes(module.VisionConfig, name)}
        ),
        **{name: value for name, value in more.items() if _takes(module.ModelConfig, name)},
    )
    return VisionLanguageModel(_with_weights(module.Model(config), seed))


def _with_weights(model: Any, seed: int) -> Any:
    mx.random.seed(seed)
    weights = [
        (name, mx.random.normal(x.shape) * (0.3 if x.ndim > 1 else 0.1) + (0.0 if x.ndim > 1 else 1.0))
        for name, x in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model


def _model_of_mlx_lm(family: str, text: dict[str, Any]) -> Any:
    """In plain operations and float32 throughout, so that sums in other shapes are the same."""
    module: Any = importlib.import_module(f"mlx_lm.models.{family}")
    for name, function in STAND_INS[family].items():
        setattr(module, name, function)
    module.mx = types.SimpleNamespace(**vars(mx) | {"bfloat16": mx.float32})
    eyes = EYES | {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4}
    more = {"model_type": family, "text_config": text, "vision_config": eyes, "image_token_id": IMAGE}
    return module.Model(module.ModelArgs.from_dict(more))


def _takes(kind: Any, name: str) -> bool:
    return name in kind.__dataclass_fields__


def make_image(family: str, seed: int, patches: tuple[int, int] = (4, 6)) -> Image:
    """An image as a family's processor would give it; `patches` are its height and width where they may vary."""
    draw = np.random.default_rng(seed)
    if family in SEVERAL_AXES:
        height, width = patches
        pixels = draw.standard_normal((height * width, 3 * 2 * 4 * 4), np.float32)
        inputs = {"pixel_values": pixels, "image_grid_thw": np.array([[1, height, width]])}
        return Image([IMAGE] * (height * width // 4), IMAGE, inputs)
    pixels = draw.standard_normal((1, 3, 16, 16), np.float32)
    if family in OF_MLX_LM:
        height, width = patches
        pixels = draw.standard_normal((3, 4 * height, 4 * width), np.float32)
        return Image([IMAGE] * (height * width // 4), IMAGE, {"pixel_values": pixels})
    if family == "gemma3":
        return Image([IMAGE] * 4, IMAGE, {"pixel_values": pixels})
    if family == "llava":
        return Image([IMAGE] * 16, IMAGE, {"pixel_values": pixels})
    tiles = draw.standard_normal((1, 2, 3, 16, 16), np.float32)  # two parts, with a token between them
    return Image([*[IMAGE] * 4, 7, *[IMAGE] * 4], IMAGE, {"pixel_values": tiles})


def with_images(parts: Parts) -> list[int]:
    """Token ids of a prompt: texts, and images as `encode_images` would write them."""
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, Image):
            ids = iter(part.ids)
            tokens += [START, *(next(ids) if token == IMAGE else token for token in part.tokens), END]
        else:
            tokens += part
    return tokens


def some_parts(family: str, chance: random.Random, images: int) -> list[list[int] | Image]:
    """A prompt: texts, and images between them, of a few that come again and again."""
    parts: list[list[int] | Image] = [[chance.randrange(3, 180) for _ in range(chance.randint(1, 9))]]
    for _ in range(images):
        patches = chance.choice([(4, 4), (4, 6), (8, 4)])
        parts.append(make_image(family, chance.randrange(4) + 10 * patches[0] + patches[1], patches))
        parts.append([chance.randrange(3, 180) for _ in range(chance.randint(1, 9))])
    return parts


def known(model: VisionLanguageModel, parts: Parts) -> list[list[int] | Image]:
    """The parts with the model's own images."""
    return [model.images.add(part) if isinstance(part, Image) else part for part in parts]


def prompt(parts: Parts) -> ImagePrompt:
    return ImagePrompt(with_images(parts), tuple(part for part in parts if isinstance(part, Image)))


def plain_tokens(parts: Parts) -> list[int]:
    """The same with the family's token for each place."""
    return [token if token < VOCABULARY else IMAGE for token in with_images(parts)]


class Reference:
    """The library's own way: all images of a prompt encoded at once, all of it in one pass, its own caches."""

    def __init__(self, family: str, model: VisionLanguageModel) -> None:
        self.family, self.model = family, model.model
        self.base: Any = stock if family in OF_MLX_LM else importlib.import_module("mlx_vlm.models.cache")

    def caches(self) -> list[Any]:
        if self.family in OF_MLX_LM:
            return stock.make_prompt_cache(self.model)
        language: Any = self.model.language_model
        made = language.make_cache() if hasattr(language, "make_cache") else None
        return made or [self.base.KVCache() for _ in self.model.layers]

    def logits(self, parts: Parts, caches: list[Any] | None = None) -> mx.array:
        """(S, V) of a prompt."""
        tokens, images = plain_tokens(parts), [part for part in parts if isinstance(part, Image)]
        caches = self.caches() if caches is None else caches
        if self.family in OF_MLX_LM:
            return self._read(tokens, {"pixel_values": [image.inputs["pixel_values"] for image in images]}, caches)
        names = images[0].inputs if images else {}
        axis = 1 if self.family in ("idefics3", "smolvlm") else 0
        joined = {name: np.concatenate([each.inputs[name] for each in images], axis) for name in names}
        return self._read(tokens, joined, caches)

    def _read(self, listed: list[int], inputs: dict[str, Any], caches: list[Any]) -> mx.array:
        if self.family in OF_MLX_LM:
            pictures = [mx.array(pixels) for pixels in inputs["pixel_values"]]
            embedded = self.model.embed_inputs(mx.array([listed]), pixel_values=pictures or None)
            return self.model(mx.array([listed]), cache=caches, input_embeddings=embedded)[0]
        tokens, joined = mx.array([listed]), {name: mx.array(value) for name, value in inputs.items()}
        pixels = joined.pop("pixel_values", None)
        read = self.model.get_input_embeddings(tokens, pixels, mask=mx.ones_like(tokens), **joined)
        names = ("position_ids", "visual_pos_masks", "deepstack_visual_embeds")
        options = {name: value for name in names if (value := getattr(read, name)) is not None}
        if "position_ids" in options and options["position_ids"].ndim == 2:
            options["position_ids"] = mx.broadcast_to(
                options["position_ids"][None], (3, *options["position_ids"].shape)
            )
        self.delta = 0 if read.rope_deltas is None else int(read.rope_deltas.reshape(-1)[0].item())
        return self.model.language_model(tokens, inputs_embeds=read.inputs_embeds, cache=caches, **options).logits[0]

    def generate(self, parts: Parts, count: int) -> list[int]:
        """The likeliest tokens after a prompt."""
        caches = self.caches()
        return self._continue(self.logits(parts, caches), caches, len(plain_tokens(parts)), count)

    def continue_inputs(self, tokens: list[int], inputs: dict[str, Any], count: int) -> list[int]:
        """The likeliest tokens after what a processor made of a prompt."""
        caches = self.caches()
        return self._continue(self._read(tokens, inputs, caches), caches, len(tokens), count)

    def _continue(self, logits: mx.array, caches: list[Any], length: int, count: int) -> list[int]:
        said: list[int] = []
        for number in range(count):
            said.append(int(logits[-1].argmax().item()))
            if self.family in OF_MLX_LM:
                logits = self.model(mx.array([[said[-1]]]), cache=caches)[0]
                continue
            options = {}
            if self.family in SEVERAL_AXES:
                options = {"position_ids": mx.full((3, 1, 1), length + number + self.delta)}
            logits = self.model.language_model(mx.array([[said[-1]]]), cache=caches, **options).logits[0]
        return said


# --- files ------------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}MARK{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
PROCESSORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLImageProcessor", {"min_pixels": 64}),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", {"min_pixels": 64}),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen2VLImageProcessorFast", {"min_pixels": 64}),
    "idefics3": ("Idefics3Processor", "Idefics3ImageProcessor", {"size": {"longest_edge": 32}}),
    "smolvlm": ("SmolVLMProcessor", "SmolVLMImageProcessor", {"size": {"longest_edge": 32}}),
    "llava": ("LlavaProcessor", "CLIPImageProcessor", {"size": {"shortest_edge": 16}}),
    "gemma3": ("Gemma3Processor", "Gemma3ImageProcessor", {"size": {"height": 16, "width": 16}}),
}


def save_model(family: str, folder: Path, seed: int = 0, max_pixels: int = 4096, **sizes: Any) -> Path:
    """Files of a model as a repository has them, with a tokenizer of single characters.

    Args:
        max_pixels: of an image of Qwen's families.
        sizes: as of `make_model`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    model: Any = make_model(family, seed, **sizes).model
    config = asdict(model.args if family in OF_MLX_LM else model.config)
    if family in ("qwen2_vl", "qwen2_5_vl"):  # the settings of text are not in a part of their own
        config = config.pop("text_config") | config
    config |= {"model_type": family, "eos_token_id": 2}
    if family == "muse_spark":  # transformers checks what reads sounds
        config |= {"audio_config": {"out_hidden_size": config["text_config"]["hidden_size"]}}
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    grid = family in SEVERAL_AXES
    special = {START: "<|vision_start|>", END: "<|vision_end|>", IMAGE: "<|image_pad|>" if grid else "<image>"}
    if family in OF_MLX_LM:
        special = {START: "<|image_start|>", END: "<|image_end|>", IMAGE: "<|patch|>"}
    special |= {191: "<|video_pad|>", 192: "<start_of_image>", 193: "<end_of_image>"}
    special |= {194: "<fake_token_around_image>", 195: "<global-img>"}
    names = ["<unk>", "<s>", "</s>", *string.printable]
    names += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    names += [f"<{number}>" for number in range(len(names), VOCABULARY)]
    for number, name in special.items():
        names[number] = name
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([name for name in names if len(name) > 1])
    tokenizer.save(str(folder / "tokenizer.json"))
    mark = "<|vision_start|><|image_pad|><|vision_end|>" if grid else special[IMAGE]
    mark = "<start_of_image>" if family == "gemma3" else mark
    words = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    words |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE.replace("MARK", mark)}
    if family == "gemma3":
        words |= {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    if family in OF_MLX_LM:  # whose processor is made of config.json
        return folder
    processor, pictures, pixels = PROCESSORS[family]
    settings = {"processor_class": processor, "image_processor_type": pictures, "patch_size": 4, **pixels}
    settings |= {"max_pixels": max_pixels} if grid else {}
    settings |= {"merge_size": 2, "temporal_patch_size": 2, "crop_size": {"height": 16, "width": 16}}
    settings |= {"max_image_size": {"longest_edge": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    settings = {"processor_class": processor, "patch_size": 4, "vision_feature_select_strategy": "default"}
    settings |= {"image_token": "<image>", "num_additional_image_tokens": 1, "image_seq_len": 4, "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder
