"""Heads that draft, from files as their families publish them: the weights are found, and read as they are meant."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from tiny_models import COMMON, FAMILIES, GATED_DELTA, MLA, VOCAB, make_model

from mlx_kv.bundled import model_path
from mlx_kv.files import tensor_files
from mlx_kv.mlxlm.head_files import HeadShape, find_draft_head, head_file, load_draft_head, save_draft_head
from mlx_kv.mlxlm.heads import DraftHead
from mlx_kv.mlxlm.loading import load, release_weights, weight_bytes
from mlx_kv.mlxlm.taps import HiddenTap

Tensors = dict[str, mx.array]
SIZE = 64
MOE: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    **{family: GATED_DELTA[family] for family in ("qwen3_next", "qwen3_5")},
    "deepseek_v3": {**COMMON, **MLA, **MOE, "moe_intermediate_size": 32, "moe_layer_freq": 1},
    "deepseek_v32": {**FAMILIES["deepseek_v32"], **MOE, "moe_intermediate_size": 32, "moe_layer_freq": 1},
    "glm4_moe": {
        **COMMON,
        **MOE,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "attention_bias": False,
        "use_qk_norm": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
    },
    "mimo": {**COMMON, "num_nextn_predict_layers": 1},
}


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    for family, settings in MODELS.items():
        monkeypatch.setitem(FAMILIES, family, settings)


def published(head: DraftHead, family: str, layers: int) -> Tensors:
    """The weights of a head as its family publishes them."""
    own: Tensors = dict(tree_flatten(head.parameters()))
    if family.startswith("qwen"):
        names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "layer": "layers.0"}
        prefix = "mtp."
    elif family == "mimo":
        names = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "fc": "input_proj"}
        names |= {"norm": "final_layernorm", "layer": ""}
        prefix = "model.mtp_layers.0."
    else:
        names = {"fc": "eh_proj", "norm": "shared_head.norm", "layer": ""}
        prefix = f"model.layers.{layers}."
    tensors: Tensors = {}
    for name, weight in own.items():
        part, _, rest = name.partition(".")
        base = names.get(part, part)
        base = f"{base}." if base else ""
        if "switch_mlp" in rest:
            for number, expert in enumerate(weight):
                tensors[prefix + base + rest.replace("switch_mlp", f"experts.{number}")] = expert
            continue
        if family.startswith("qwen") and name.endswith("norm.weight") and weight.ndim == 1:
            weight = weight - 1.0
        tensors[prefix + base + rest] = weight
    if family.startswith("deepseek"):
        key = f"{prefix}self_attn."
        wk, wv = tensors.pop(f"{key}embed_q.weight"), tensors.pop(f"{key}unembed_out.weight")
        tensors[f"{key}kv_b_proj.weight"] = mx.concatenate([wk.swapaxes(-1, -2), wv], axis=1).reshape(-1, wk.shape[1])
    if family.startswith(("deepseek", "glm")):  # copies of the model's own, which are not needed
        tensors[f"{prefix}embed_tokens.weight"] = tensors[f"{prefix}shared_head.head.weight"] = mx.ones((VOCAB, SIZE))
    return tensors


def made(model: nn.Module, family: str) -> DraftHead:
    """A head with random weights, made by hand."""
    text: Any = getattr(model, "language_model", model)
    kind, args = type(text.model.layers[-1]), text.args
    mx.random.seed(7)
    if family.startswith("qwen"):
        layer = kind(args, args.full_attention_interval - 1)
    else:
        layer = kind(args) if family == "mimo" else kind(args, args.num_hidden_layers)
    hidden: Any = (len(model.layers) - 1,) if family == "mimo" else "final"  # type: ignore[arg-type]
    head = DraftHead(layer, SIZE, SIZE, 1e-5, hidden=hidden, hidden_first=family == "mimo", array_masks=True)
    head.update(tree_map(lambda x: x + 0.2 * mx.random.normal(x.shape), head.parameters()))
    head.bind(model)
    return head


def write(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None, **metadata: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata or {"format": "pt"})
    return folder


def check_same(one: DraftHead, other: DraftHead, tolerance: float = 1e-5) -> None:
    tokens, states = mx.array([[5, 9, 3, 60]]), mx.random.normal((1, 4, one.width), key=mx.random.key(1))
    first, second = one(tokens, None, states), other(tokens, None, states)
    assert mx.abs(first).max().item() > 0.1
    assert mx.allclose(first, second, atol=tolerance, rtol=tolerance).item()
    assert mx.allclose(one.logits(first[:, -1]), other.logits(second[:, -1]), atol=10 * tolerance).item()


@pytest.mark.parametrize("family", MODELS)
def test_heads_in_the_files_of_their_models(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    head, layers = made(model, family), len(model.layers)  # type: ignore[arg-type]
    tensors = published(head, family, layers)
    folder = write(tmp_path / "model", tensors | {"model.embed_tokens.weight": mx.ones((VOCAB, SIZE))})
    check_same(load_draft_head(folder, model), head)
    found = find_draft_head(folder, model)
    assert found is not None
    assert find_draft_head(write(tmp_path / "without", {"lm_head.weight": mx.ones((2, 2))}), model) is None


def test_only_the_shards_with_the_head_are_read(tmp_path: Path) -> None:
    model = make_model("qwen3_5")
    head = made(model, "qwen3_5")
    tensors = published(head, "qwen3_5", 3)
    folder = write(tmp_path / "model", tensors)
    (folder / "model.safetensors").rename(folder / "model-00002.safetensors")
    (folder / "model-00001.safetensors").write_bytes(b"nothing that could be read")
    weight_map = dict.fromkeys(tensors, "model-00002.safetensors") | {"lm_head.weight": "model-00001.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check_same(load_draft_head(folder, model), head)


@pytest.mark.parametrize("bits", [None, 8])
def test_a_folder_of_mlx_vlm(bits: int | None, tmp_path: Path) -> None:
    model = make_model("qwen3_next")
    head = made(model, "qwen3_next")
    tensors = {
        name.removeprefix("mtp."): x + 1.0 if "norm" in name and x.ndim == 1 else x
        for name, x in published(head, "qwen3_next", 3).items()
        if "experts." not in name
    }
    own: Tensors = dict(tree_flatten(head.parameters()))
    tensors |= {"layers.0." + name.removeprefix("layer."): x for name, x in own.items() if "switch_mlp" in name}
    if bits is not None:
        for name in [name for name, x in tensors.items() if x.ndim >= 2 and not name.endswith("mlp.gate.weight")]:
            base = name.removesuffix("weight")
            tensors[name], tensors[base + "scales"], tensors[base + "biases"] = mx.quantize(tensors[name], 32, bits)
    folder = write(tmp_path / "head", tensors, {"model_type": "qwen3_5_mtp", "block_size": 3}, format="mlx")
    loaded = load_draft_head(folder, model)
    check_same(loaded, head, 1e-5 if bits is None else 0.1)
    assert ("scales" in loaded.fc) == (bits is not None)


def test_a_head_is_quantised_like_its_model(tmp_path: Path) -> None:
    model = make_model("qwen3_5")
    head = made(model, "qwen3_5")
    folder = write(tmp_path / "model", published(head, "qwen3_5", 3))
    nn.quantize(model, 32, 8)
    loaded = load_draft_head(folder, model)
    assert (loaded.layer.self_attn.q_proj.bits, loaded.layer.mlp.up_proj.group_size) == (8, 32)
    assert "scales" not in loaded.fc
    head.bind(model)
    check_same(loaded, head, 0.1)


def test_weights_in_eight_bits_with_scales(tmp_path: Path) -> None:
    model = make_model("deepseek_v3")
    head = made(model, "deepseek_v3")
    tensors = published(head, "deepseek_v3", 3)
    for name in [name for name in tensors if name.endswith(("gate_proj.weight", "o_proj.weight"))]:
        scale = mx.array([[0.01]])
        tensors[name], tensors[name + "_scale_inv"] = mx.to_fp8(tensors[name] / 0.01), scale
    check_same(load_draft_head(write(tmp_path / "model", tensors), model), head, 0.1)


# --- EAGLE-3 ----------------------------------------------------------------------------------------------------------


def eagle_reference(tensors: Tensors, embedded: mx.array, states: mx.array, norm_first: bool) -> mx.array:
    """Logits (S, n) of the tokens that a head of EAGLE-3 guesses, written down once more; one head of attention."""

    def norm(x: mx.array, name: str) -> mx.array:
        return tensors[f"{name}.weight"] * x / mx.sqrt(mx.mean(x * x, axis=-1, keepdims=True) + 1e-5)

    def linear(x: mx.array, name: str) -> mx.array:
        return x @ tensors[f"{name}.weight"].T

    h = linear(states, "fc")
    residual = norm(h, "midlayer.hidden_norm") if norm_first else h
    x = mx.concatenate([norm(embedded, "midlayer.input_layernorm"), norm(h, "midlayer.hidden_norm")], axis=-1)
    q, k, v = (linear(x, f"midlayer.self_attn.{name}_proj") for name in "qkv")
    rope = nn.RoPE(SIZE, base=10000.0)
    q, k = rope(q[None])[0], rope(k[None])[0]
    scores = q @ k.T / SIZE**0.5 + mx.triu(mx.full((len(x), len(x)), -mx.inf), 1)
    h = residual + linear(mx.softmax(scores, axis=-1) @ v, "midlayer.self_attn.o_proj")
    y = norm(h, "midlayer.post_attention_layernorm")
    h = h + linear(
        nn.silu(linear(y, "midlayer.mlp.gate_proj")) * linear(y, "midlayer.mlp.up_proj"), "midlayer.mlp.down_proj"
    )
    return linear(norm(h, "norm"), "lm_head")


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": SIZE,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "draft_vocab_size": 40,
}


@pytest.mark.parametrize(
    ("more", "layers", "norm_first"),
    [
        ({}, (1, 3, 4), False),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "norm_before_residual": True}, (0, 1, 3), True),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, (1, 2, 3), False),
    ],
)
def test_heads_of_eagle(more: dict[str, Any], layers: tuple[int, ...], norm_first: bool, tmp_path: Path) -> None:
    model = make_model("llama", num_hidden_layers=8)
    keys = iter(mx.random.split(mx.random.key(3), 20))

    def matrix(rows: int, columns: int) -> mx.array:
        return 0.2 * mx.random.normal((rows, columns), key=next(keys))

    layer = {f"self_attn.{name}_proj": matrix(SIZE, 2 * SIZE) for name in "qkv"} | {
        "self_attn.o_proj": matrix(SIZE, SIZE)
    }
    layer |= {"mlp.gate_proj": matrix(32, SIZE), "mlp.up_proj": matrix(32, SIZE), "mlp.down_proj": matrix(SIZE, 32)}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    layer |= {name: 1 + 0.2 * mx.random.normal((SIZE,), key=next(keys)) for name in norms}
    tensors = {f"midlayer.{name}.weight": x for name, x in layer.items()}
    tensors |= {
        "fc.weight": matrix(SIZE, 3 * SIZE),
        "norm.weight": mx.ones(SIZE) * 1.5,
        "lm_head.weight": matrix(40, SIZE),
    }
    ids = mx.arange(40) * 2
    stored = tensors | {"d2t": ids - mx.arange(40), "t2d": mx.zeros((VOCAB,), mx.bool_)}
    head = load_draft_head(write(tmp_path / "eagle", stored, CONFIG | more), model)
    assert head.hidden == layers
    tokens = mx.array([[5, 9, 3, 60]])
    tap = HiddenTap(model, layers)
    _, states = tap(tokens)
    wanted = eagle_reference(tensors, tap.embed(tokens)[0], states[0], norm_first)
    logits = head.logits(head(tokens, None, states)[0])
    assert mx.allclose(logits[:, ids], wanted, atol=1e-4).item()
    assert mx.isinf(logits[:, 1::2]).all().item()


# --- heads of train-drafter -------------------------------------------------------------------------------------------

SHAPE = HeadShape(SIZE, 4, 2, 32, 48, 30)


def trained(model: nn.Module) -> DraftHead:
    head = SHAPE.make_head()
    head.guess_only(mx.arange(30, dtype=mx.int32) * 3)
    head.bind(model)
    return head


def test_a_trained_head_guesses_some_tokens_and_is_found_beside_its_model(tmp_path: Path) -> None:
    model = make_model("llama")
    head = trained(model)
    (tmp_path / "model").mkdir()
    path = head_file(tmp_path / "model")
    head.details["tokens"] = 5
    save_draft_head(path, head, model)
    found = find_draft_head(tmp_path / "model", model)
    assert found is not None
    assert found.details == {"tokens": 5}
    check_same(found, head)
    outputs = head(mx.array([[1, 2]]))[:, -1]
    full, some = head.logits(outputs)[0], head.tap.project(outputs)[0]
    assert mx.allclose(full[::3][:30], some[head.ids], atol=1e-5).item()
    assert mx.isinf(full[1::3]).all().item()
    with pytest.raises(ValueError, match="is a head of another model"):
        load_draft_head(path, make_model("llama", seed=4))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_trained_head_has_rows_of_a_quantised_output_head(bits: int) -> None:
    model = make_model("llama", tie_word_embeddings=False)
    nn.quantize(model, 32, bits)
    head = trained(model)
    outputs = head(mx.array([[1, 2]]))[:, -1]
    assert mx.allclose(head.logits(outputs)[0, head.ids], head.tap.project(outputs)[0, head.ids], atol=1e-4).item()


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def other_tokens(path: Path) -> None:
    tensors, words = mx.load(str(path), return_metadata=True)  # type: ignore[misc]
    mx.save_safetensors(str(path), {**tensors, "ids": mx.full((30,), VOCAB, mx.int32)}, words)  # type: ignore[dict-item,arg-type]


def a_weight_less(path: Path) -> None:
    tensors, words = mx.load(str(path), return_metadata=True)  # type: ignore[misc]
    mx.save_safetensors(str(path), {k: x for k, x in tensors.items() if k != "fc.weight"}, words)  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, "cut off"),
        (other_tokens, "tokens that the model does not have"),
        (a_weight_less, "fc.weight is missing"),
    ],
)
def test_damaged_files_are_refused(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    model = make_model("llama")
    path = tmp_path / "x.kvdraft.safetensors"
    save_draft_head(path, trained(model), model)
    damage(path)
    with pytest.raises(ValueError, match=message):
        load_draft_head(path, model)


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    model = make_model("llama")
    other = tmp_path / "x.safetensors"
    tensor_files.write(other, {"x": mx.ones(2)}, {})
    with pytest.raises(ValueError, match="is no head that drafts"):
        load_draft_head(other, model)
    with pytest.raises(ValueError, match="exists and is not a draft head"):
        save_draft_head(other, trained(model), model)
    with pytest.raises(ValueError, match="has no head that drafts for llama"):
        load_draft_head(write(tmp_path / "model", {"x": mx.ones(2)}), model)
    with pytest.raises(ValueError, match="this head reads states of 32"):
        DraftHead(llama.TransformerBlock(model.args), 32, SIZE, 1e-5).bind(model)  # type: ignore[no-untyped-call]


# --- weights that come and go, and files that are wrong ---------------------------------------------------------------


def test_weights_of_a_model_with_a_head_can_be_freed(tmp_path: Path) -> None:
    """Neither the tap nor the head's rows of the output head keep any of them."""
    path = model_path("reference")
    model, _ = load(path)
    head = HeadShape(256, 4, 2, 64, 64, 500).make_head()
    head.guess_only(mx.arange(500, dtype=mx.int32))
    head.bind(model)
    save_draft_head(tmp_path / "x.kvdraft.safetensors", head, model)
    head = load_draft_head(tmp_path / "x.kvdraft.safetensors", model)
    wanted = head.logits(head(mx.array([[1, 2]]))[:, -1])
    mx.eval(wanted, model.parameters())
    held = mx.get_active_memory()
    release_weights(model, lambda: load(path, lazy=True)[0])
    head.release()
    assert mx.get_active_memory() < held - 0.9 * (weight_bytes(model) + weight_bytes(head))
    assert mx.allclose(head.logits(head(mx.array([[1, 2]]))[:, -1]), wanted, atol=1e-5).item()


def test_a_head_of_files_is_freed_and_read_again(tmp_path: Path) -> None:
    model = make_model("qwen3_5")
    head = made(model, "qwen3_5")
    loaded = load_draft_head(write(tmp_path / "model", published(head, "qwen3_5", 3)), model)
    loaded.release()
    check_same(loaded, head)


WRONG: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "another d2t": (lambda x: x | {"d2t": mx.full((40,), 10_000_000)}, "tokens that the model does not have"),
    "no d2t": (lambda x: {k: v for k, v in x.items() if k != "d2t"}, "does not say which: d2t is missing"),
    "another layer": (lambda x: x | {"layers.1.mlp.up_proj.weight": mx.ones((2, 2))}, "of a kind that is not known"),
    "other norms": (lambda x: x | {"input_norm.weight": mx.ones((192,))}, "of a kind that is not known"),
    "codes": (lambda x: x | {"fc.weight": mx.zeros((SIZE, 3 * SIZE), mx.uint8)}, "a form of weights that is not known"),
    "a shape": (lambda x: x | {"fc.weight": mx.zeros((SIZE, SIZE))}, "this model needs"),
}


def eagle_tensors() -> Tensors:
    keys = iter(mx.random.split(mx.random.key(3), 20))
    shapes = {f"self_attn.{name}_proj": (SIZE, 2 * SIZE) for name in "qkv"} | {"self_attn.o_proj": (SIZE, SIZE)}
    shapes |= {"mlp.gate_proj": (32, SIZE), "mlp.up_proj": (32, SIZE), "mlp.down_proj": (SIZE, 32)}
    tensors = {f"midlayer.{name}.weight": mx.random.normal(shape, key=next(keys)) for name, shape in shapes.items()}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": mx.ones(SIZE) for name in norms}
    tensors |= {"fc.weight": mx.ones((SIZE, 3 * SIZE)), "lm_head.weight": mx.ones((40, SIZE))}
    return tensors | {"d2t": mx.arange(40)}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_heads_of_eagle_are_refused(name: str, tmp_path: Path) -> None:
    change, message = WRONG[name]
    model = make_model("llama", num_hidden_layers=8)
    load_draft_head(write(tmp_path / "right", eagle_tensors(), CONFIG), model)
    with pytest.raises(ValueError, match=message):
        load_draft_head(write(tmp_path / "wrong", change(eagle_tensors()), CONFIG), model)
    with pytest.raises(ValueError, match="with norm_output, which is not known here"):
        load_draft_head(write(tmp_path / "other", eagle_tensors(), CONFIG | {"norm_output": True}), model)


def test_a_part_of_a_model_has_a_head_with_attention(tmp_path: Path) -> None:
    """Layers have other numbers there."""
    model = make_model("qwen3_5", text_config={**GATED_DELTA["qwen3_5"]["text_config"], "num_hidden_layers": 6})
    head = made(model, "qwen3_5")
    folder = write(tmp_path / "model", published(head, "qwen3_5", 6))
    text: Any = model.language_model.model  # type: ignore[attr-defined]
    text.layers, text.fa_idx, text.ssm_idx = text.layers[1:4], 0, 1  # with attention, without, with
    loaded = load_draft_head(folder, model)
    assert type(loaded.make_cache()[0]).__name__ == "KVCache"
    check_same(loaded, head)


def test_files_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    model = make_model("qwen3_5")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match="cannot be read"):
        load_draft_head(folder, model)
    (folder / "model.safetensors.index.json").write_text("[]")
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="cannot be read"):
        load_draft_head(folder, model)
