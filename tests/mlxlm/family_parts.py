"""What configurations of many model files of mlx-lm share: names of sizes, experts, latent attention, layers by kind.

Head dims that groups of 32 divide, and windows of 16.
"""

from __future__ import annotations

from typing import Any

import tiny_models
from tiny_models import LLAMA4 as LLAMA4
from tiny_models import VOCAB as VOCAB

WINDOW = 16

# What most files call things; each takes what it knows.
COMMON: dict[str, Any] = {
    **tiny_models.COMMON,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
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
CONVOLUTION = {**tiny_models.CONVOLUTION, "layer_types": ["conv", "full_attention"] * 2}
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
