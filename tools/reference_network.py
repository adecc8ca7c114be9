"""The llama architecture in PyTorch, small enough to train on two cores, with mlx-lm's parameter names.

Decides the shapes of the models that are shipped and how they compute. Knows nothing about corpora, optimisers or
files. The state dict of `Llama` is, name for name, what mlx-lm's `llama` loads. B rows, T tokens, D head dim.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """The fields of an mlx-lm / Hugging Face `config.json` that matter here."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 64
    vocab_size: int = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096

    def to_json(self) -> dict[str, object]:
        fixed = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
        return {**fixed, **asdict(self), "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False}


PRESETS = {
    "reference": LlamaConfig(256, 704, 4, num_attention_heads=4, num_key_value_heads=2),
    "draft": LlamaConfig(64, 192, 2, num_attention_heads=2, num_key_value_heads=1),
    "distilled": LlamaConfig(128, 192, 2, num_attention_heads=4, num_key_value_heads=2),  # of `draft`: see `induction`
    "recall": LlamaConfig(128, 96, 4, 4, 2, vocab_size=256, max_position_embeddings=1024),
}


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, heads, T, D): the halves of D are the pairs, as in Hugging Face's llama."""
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q_proj(x).view(rows, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        groups = self.heads // self.kv_heads
        k, v = rotate(k, cos, sin).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config, self.model = config, Trunk(config)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                depth = 2 * config.num_hidden_layers if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                nn.init.normal_(p, std=0.02 / depth**0.5)

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        half = self.config.head_dim // 2
        frequency = self.config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency  # (T, D / 2)
        device = self.model.norm.weight.device
        return angle.cos().to(device), angle.sin().to(device)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor, last: int = 0) -> Tensor:
        """tokens (B, T) -> logits (B, T, vocab), or those of the `last` places alone."""
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x[:, -last:]), self.model.embed_tokens.weight)


def token_losses(model: nn.Module, tokens: Tensor, cos: Tensor, sin: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean cross-entropy in nats per token of (B, T + 1) windows; with (B, T) weights, the sum of what each weighs."""
    logits = model(tokens[:, :-1], cos, sin).float().flatten(0, 1)
    if weights is None:
        return F.cross_entropy(logits, tokens[:, 1:].flatten())
    return F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none") @ weights.flatten()
