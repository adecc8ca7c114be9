"""Settings of tiny models of mlx-lm whose recurrent layers are of the gated delta rule."""

from __future__ import annotations

from typing import Any

from tiny_models import COMMON

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
