"""Every model file of mlx-lm as a tiny configuration: nothing to download, milliseconds to build.

A configuration has every type of layer that the file knows (full, sliding and recurrent attention, dense layers and
experts), four layers or so, head dims that groups of 32 divide, and windows of 16. Attention here decides something: a
model whose answer does not hang on its early tokens would hide a cache that lost them.
"""

from __future__ import annotations

import copy
import importlib
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from metal_stand_ins import STAND_INS
from mlx.utils import tree_map_with_path

VOCAB = 96
WINDOW = 16
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

# What most files call things; each takes what it knows.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "rope_scaling": None,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "moe_layer_freq": 1,
    "mlp_only_layers": [0],
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
DEEPSEEK = {**EXPERTS, **LATENT}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1}
SHORT_LONG = {"type": "longrope", "original_max_position_embeddings": 512, "short_factor": [1.0] * 16}
SHORT_LONG |= {"long_factor": [1.0] * 16, "short_mscale": 1.2, "long_mscale": 1.2}
SCALED = {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": WINDOW}
INDEXED = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 8}
SLIDING = ["sliding_attention", "full_attention"] * 2
WINDOWED = {"sliding_window": WINDOW, "layer_types": SLIDING}
ROPES = {"full_attention": {"rope_theta": 10000.0}, "sliding_attention": {"rope_theta": 1000.0}}
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 3,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
MAMBA = {
    "mamba_d_conv": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "mamba_n_heads": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
CONVOLUTION = {
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 128,
    "block_ff_dim": 64,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "full_attention"] * 2,
}
LLAMA4_TEXT = {
    "attention_chunk_size": WINDOW,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 64,
    "num_experts_per_tok": 1,
    "num_local_experts": 2,
    "use_qk_norm": True,
}
GEMMA4 = {
    **WINDOWED,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "global_head_dim": 64,
    "num_kv_shared_layers": 3,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 32,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 10000.0},
    },
}
GEMMA3N = {
    **WINDOWED,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 32,
    "rope_local_base_freq": 1000.0,
    "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.5] * 4,
    "altup_num_inputs": 2,
    "altup_coef_clip": 1.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}
LONGCAT = {
    **LATENT,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 64,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 2,
    "zero_expert_num": 2,
    "num_layers": 2,
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
KIMI_LINEAR = {
    **LATENT,
    "linear_attn_config": {"num_heads": 4, "head_dim": 32, "kda_layers": [1, 3], "short_conv_kernel_size": 4},
    "model_max_length": 512,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
MUSE = {
    **WINDOWED,
    "post_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0},
    "layer_rope_theta": [10000.0, 0] * 2,
    "final_logit_softcapping": 20.0,
    "output_multiplier": 0.2,
}
BAILING_LINEAR = {**EXPERTS, "num_key_value_heads": 4, "layer_group_size": 2, "group_norm_size": 1}
NEMOTRON_BLOCK = {
    "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
    "ffn": {"ffn_mult": 0.5, "no_op": False, "replace_with_linear": False},
}
NO_ATTENTION = {"no_op": True, "replace_with_linear": False}
LINEAR = {"no_op": False, "replace_with_linear": True}
OPENELM = {
    "num_transformer_layers": 4,
    "model_dim": 128,
    "ffn_dim_divisor": 32,
    "ffn_multipliers": [0.5, 0.5, 1.0, 1.0],
    "num_query_heads": [4, 4, 4, 4],
    "num_kv_heads": [2, 2, 4, 4],
}
# Biases of gates: so low that recurrent states forget slowly.
FORGETTING = ("dt_bias", "dt_proj.bias", "recurrent_param", "w_lora.lora.2.bias")

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "Klear": EXPERTS,
    "afm7": {
        "hidden_dim": 128,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "hidden_dim_scale_factor": 1.0,
    },
    "afmoe": {**EXPERTS, **WINDOWED, "num_dense_layers": 1},
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {
        "tie_word_embeddings": False,
        "sliding_window": WINDOW,
        "sliding_window_layers": [0, 2],
        "conv_window": 2,
    },
    "bailing_hybrid": {**BAILING_LINEAR, **LATENT},
    "bailing_moe": EXPERTS,
    "bailing_moe_linear": BAILING_LINEAR,
    "bailing_moe_v3": {**EXPERTS, **LATENT, "layer_group_size": 2, "moe_shared_expert_intermediate_size": 32},
    "bitnet": {},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "dbrx": {
        "d_model": 128,
        "n_layers": 4,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    },
    "deepseek": EXPERTS,
    "deepseek_v2": {**DEEPSEEK, "topk_method": "greedy", "rope_scaling": YARN},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": {**DEEPSEEK, **INDEXED},
    "deepseek_v41": {
        **DEEPSEEK,
        **INDEXED,
        "o_groups": 2,
        "o_lora_rank": 32,
        "sliding_window": WINDOW,
        "compress_ratios": [0, 4, 4, 4],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 3],
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 2,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
    },
    "dots1": EXPERTS,
    "ernie4_5": {},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_layer_start_index": 1,
        "moe_intermediate_size": 32,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
    },
    "exaone": {"num_layers": 4},
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": "LLG"},
    "exaone_moe": {**EXPERTS, **WINDOWED, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": MAMBA,
    "gear": {
        "layer_types": ["sliding_attention", "conv_mixer", "full_attention", "conv_mixer"],
        "sliding_window": WINDOW,
    },
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32.0},
    "gemma3": {"text": {"sliding_window": WINDOW, "sliding_window_pattern": 2}},
    "gemma3_text": {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "gemma3n": {"text": GEMMA3N},
    "gemma4": {"text": GEMMA4},
    "gemma4_text": GEMMA4,
    "glm": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {**EXPERTS, "partial_rotary_factor": 0.5, "use_qk_norm": True},
    "glm4_moe_lite": DEEPSEEK,
    "glm_moe_dsa": {**DEEPSEEK, **INDEXED, "rope_parameters": {"rope_theta": 10000.0}},
    "gpt2": {"n_ctx": 512, "n_embd": 128, "n_head": 4, "n_layer": 4, "n_positions": 512},
    "gpt_bigcode": {"n_embd": 128, "n_head": 4, "n_layer": 4, "n_inner": 64, "n_positions": 512},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25},
    "gpt_oss": {**WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gptj": {"n_embd": 128, "n_head": 4, "n_layer": 4, "n_positions": 512, "rotary_dim": 16},
    "granite": {
        "logits_scaling": 1.0,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
    },
    "granitemoe": {
        **EXPERTS,
        "logits_scaling": 1.0,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
    },
    "granitemoehybrid": {
        **EXPERTS,
        **MAMBA,
        "mamba_d_head": 64,
        "layer_types": ["mamba", "attention"] * 2,
        "logits_scaling": 1.0,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
    },
    "helium": {},
    "hunyuan": {
        **EXPERTS,
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        "use_cla": True,
        "cla_share_factor": 2,
    },
    "hunyuan_v1_dense": {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": {"num_hidden_layers": 2, "loop_num": 2, "loop_window_size": WINDOW},
    "jamba": {
        **EXPERTS,
        **MAMBA,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_expand": 1,
    },
    "kimi_k25": {"text": DEEPSEEK},
    "kimi_k3": {"text": {**KIMI_LINEAR, "attn_res_block_size": 2, "mla_use_output_gate": True}},
    "kimi_linear": KIMI_LINEAR,
    "kimi_vl": {"text": DEEPSEEK},
    "laguna": {
        **EXPERTS,
        **WINDOWED,
        "rope_parameters": ROPES,
        "num_attention_heads_per_layer": [4] * 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "partial_rotary_factor": 0.5,
    },
    "lfm2": CONVOLUTION,
    "lfm2-vl": {"text": CONVOLUTION},
    "lfm2_moe": {**EXPERTS, **CONVOLUTION, "use_expert_bias": True, "num_dense_layers": 1},
    "lille-130m": {"block_size": 512, "n_embd": 128, "n_head": 4, "n_kv_heads": 2, "n_layer": 4},
    "llama": {**WINDOWED},
    "llama4": {"text": LLAMA4_TEXT},
    "llama4_text": {"intermediate_size_mlp": 64, "no_rope_layers": [1, 0] * 2, "use_qk_norm": True},
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": LONGCAT,
    "mamba": {"state_size": 16, "conv_kernel": 4, "use_conv_bias": True, "time_step_rank": 16},
    "mamba2": {
        "num_heads": 4,
        "state_size": 16,
        "conv_kernel": 3,
        "n_groups": 2,
        "use_conv_bias": True,
        "time_step_limit": [0.01, 10.0],
        "time_step_rank": "auto",
        "intermediate_size": 128,
    },
    "mellum": {**EXPERTS, **WINDOWED, "rope_parameters": ROPES},
    "mimo": {},
    "mimo_v2_flash": {
        **EXPERTS,
        "hybrid_layer_pattern": [1, 0] * 2,
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "head_dim": 64,
        "v_head_dim": 32,
        "swa_head_dim": 64,
        "swa_v_head_dim": 32,
        "partial_rotary_factor": 0.5,
    },
    "minicpm": {"dim_model_base": 128, "scale_depth": 2.0, "scale_emb": 1.0},
    "minicpm3": {**LATENT, "rope_scaling": SHORT_LONG, "dim_model_base": 128, "scale_depth": 2.0, "scale_emb": 1.0},
    "minimax": {**EXPERTS, "rotary_dim": 16},
    "minimax_m3_vl": {
        "text": {
            **EXPERTS,
            "dense_intermediate_size": 64,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "moe_layer_freq": None,
            "layer_types": ["full_attention", "sparse_attention"] * 2,
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_block_size": 4,
            "index_topk_blocks": 3,
        }
    },
    "ministral3": {**WINDOWED, "rope_parameters": SCALED},
    "mistral3": {"text": {**WINDOWED, "model_type": "llama"}},
    "mistral4": {**DEEPSEEK, "rope_parameters": {**YARN, **SCALED}},
    "mixtral": EXPERTS,
    "muse_glimmer": MUSE,
    "muse_spark": {"text": {**EXPERTS, **MUSE, "num_shared_experts": 0, "moe_hidden_size": 64}},
    "nanbeige": {"num_loops": 2},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "nemotron-nas": {
        "block_configs": [
            NEMOTRON_BLOCK,
            {**NEMOTRON_BLOCK, "attention": NO_ATTENTION},
            {**NEMOTRON_BLOCK, "attention": LINEAR},
            NEMOTRON_BLOCK,
        ],
    },
    "nemotron_h": {
        **EXPERTS,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 3,
        "n_groups": 2,
        "use_conv_bias": True,
        "moe_shared_expert_intermediate_size": 32,
        "hybrid_override_pattern": ["M", "*", "-", "E"],
    },
    "olmo": {"d_model": 128, "n_layers": 4, "mlp_hidden_size": 128, "n_heads": 4, "embedding_size": VOCAB},
    "olmo2": {},
    "olmo3": WINDOWED,
    "olmo_hybrid": {
        **DELTA,
        "linear_num_value_heads": 2,
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "olmoe": EXPERTS,
    "openelm": OPENELM,
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "phi3small": {
        "vocab_size": 100352,  # it writes to the tokens from 100256 on
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 64,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 3,
        "mup_embedding_multiplier": 1.0,
        "mup_width_multiplier": 1.0,
    },
    "phimoe": {**EXPERTS, "rope_scaling": SHORT_LONG},
    "phixtral": {
        "num_vocab": VOCAB,
        "model_dim": 128,
        "num_heads": 4,
        "num_layers": 4,
        "rotary_dim": 16,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
    },
    "pixtral": {"text": {"model_type": "llama"}},
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "hidden_size_per_head": 32,
        "attention_window_size": WINDOW,
        "full_attention_idx": [1],
        "mamba_d_state": 16,
        "mamba_num_heads": 4,
        "mamba_step": 2,
        "mamba_chunk_size": 16,
    },
    "plamo3": {"window_size": WINDOW, "sliding_window_pattern": 2},
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": "model.layers.1.self_attn.o_proj", "embedding": False, "dtype": "float16", "block": 0},
        ],
        "text": DELTA,
    },
    "qwen": {"kv_channels": 32},
    "qwen2": {},
    "qwen2_moe": EXPERTS,
    "qwen2_vl": {"text": {"model_type": "qwen2"}},
    "qwen3": {},
    "qwen3_5": {"text": DELTA},
    "qwen3_5_moe": {"text": {**DELTA, **EXPERTS}},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_vl": {"text": {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text": {**EXPERTS, "model_type": "qwen3_moe"}},
    "recurrent_gemma": {
        "conv1d_width": 3,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {"a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16},
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "solar_open": {**EXPERTS, "partial_rotary_factor": 1.0, "use_qk_norm": True},
    "spark2_5": {**WINDOWED, "rope_parameters": ROPES},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.25},
    "starcoder2": {},
    "step3p5": {
        **WINDOWED,
        "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "moe_layers_enum": "1,2,3",
    },
    "talkie": {},
    "telechat3": {},
    "youtu_llm": LATENT,
}


def model_files() -> list[str]:
    """The names of the files that mlx-lm has for models, those of helpers among them."""
    folder = Path(mlx_lm.models.__path__[0])
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def family_names() -> list[str]:
    return list(CONFIGURATIONS)


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
