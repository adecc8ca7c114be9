"""Models of every attention family that mlx-lm has, tiny and random: no downloads, milliseconds to build.

Head dims are multiples of 32, so that every one of them can be quantised with group_size=32.
"""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn

VOCAB = 96
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": None,
    "first_k_dense_replace": 99,
}
# Chunks whose tokens see each other, and experts in every other layer.
LLAMA4: dict[str, Any] = {
    "attention_chunk_size": 16,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 64,
    "num_experts_per_tok": 1,
    "num_local_experts": 2,
    "use_qk_norm": True,
}
LLAMA4_TEXT: dict[str, Any] = {
    **COMMON,
    **LLAMA4,
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "attention_bias": False,
    "rope_scaling": None,
}
CONVOLUTION: dict[str, Any] = {
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 128,
    "block_ff_dim": 64,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen3": COMMON,
    "gemma2": {**COMMON, "query_pre_attn_scalar": 32.0},
    "gemma3_text": {**COMMON, "num_hidden_layers": 4, "sliding_window": 12, "sliding_window_pattern": 2},
    "olmo3": {**COMMON, "num_hidden_layers": 4, "sliding_window": 12},
    "mistral": {
        **COMMON,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "gpt_oss": {
        **COMMON,
        "num_hidden_layers": 4,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 12,
    },
    "llama4": {"model_type": "llama4", "text_config": LLAMA4_TEXT},
    "deepseek_v3": {**COMMON, **MLA},
    "deepseek_v32": {**COMMON, **MLA, "index_head_dim": 32, "index_n_heads": 2, "index_topk": 8},
    "lfm2": {
        **COMMON,
        "hidden_size": 128,
        "norm_eps": 1e-5,
        **CONVOLUTION,
        "full_attn_idxs": [1],
        "rope_parameters": {"rope_theta": 10000.0},
    },
    "falcon_h1": {
        **COMMON,
        "mamba_d_conv": 4,
        "mamba_d_head": 32,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 2,
        "mamba_chunk_size": 16,
    },
}


# Recurrent layers of the gated delta rule.
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
QWEN_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
TEXT = {**COMMON, **LINEAR, "model_type": "qwen3_5_text", "full_attention_interval": 2}
GATED_DELTA: dict[str, dict[str, Any]] = {
    "qwen3_next": {**COMMON, **LINEAR, **QWEN_MOE},
    "qwen3_5": {"model_type": "qwen3_5", "text_config": TEXT},
    "kimi_linear": {
        **COMMON,
        "num_key_value_heads": 4,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 512,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "olmo_hybrid": {
        **COMMON,
        **LINEAR,
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
}


ARCHITECTURES = {"mistral": "llama"}  # mlx-lm's name for it, too


def make_model(family: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A model of an mlx-lm architecture with random weights, the same for the same seed."""
    module = importlib.import_module(f"mlx_lm.models.{ARCHITECTURES.get(family, family)}")
    mx.random.seed(seed)
    model = module.Model(
        module.ModelArgs.from_dict({"model_type": family, **(FAMILIES | GATED_DELTA)[family], **changes})
    )
    # Attention that is nearly uniform would hide a wrong mask: make it decide.
    model.update(nn.utils.tree_map(lambda p: p * 3 if p.ndim == 2 else p, model.parameters()))
    mx.eval(model.parameters())
    return model
