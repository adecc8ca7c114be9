"""What a trained model says, for a smaller one to learn from: how it goes on, and what it finds likeliest.

Decides how rows are continued and what of the teacher's opinion is kept. Knows nothing about corpora, students or
losses. B rows, T tokens, P of them the prompt.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import torch
import torch.nn.functional as F
from reference_network import Llama, LlamaConfig, rotate
from safetensors.torch import load_file
from torch import Tensor

LIKELIEST = 16  # tokens of each place; the rest of the distribution is forgotten
ROWS_AT_ONCE = 16


def read_model(folder: Path) -> Llama:
    """An exported model, float32."""
    config = json.loads((folder / "config.json").read_text())
    model = Llama(LlamaConfig(**{field.name: config[field.name] for field in fields(LlamaConfig)}))
    model.load_state_dict({name: p.float() for name, p in load_file(folder / "model.safetensors").items()})
    return model.eval()


@torch.no_grad()
def continued(model: Llama, prompts: Tensor, length: int, temperature: float = 0, seed: int = 0) -> Tensor:
    """(B, P) prompts as (B, length) tokens, gone on with greedily (temperature 0) or by drawing. int64."""
    c, (rows, read) = model.config, prompts.shape
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(seed)
    kept = torch.zeros(c.num_hidden_layers, 2, rows, c.num_key_value_heads, length, c.head_dim, dtype=dtype)
    cos, sin = (angle.to(dtype) for angle in model.angles(length))
    tokens = torch.cat((prompts, prompts.new_zeros(rows, length - read)), 1)
    start = 0
    for end in range(read, length):
        x = model.model.embed_tokens(tokens[:, start:end])
        for layer, (keys, values) in zip(model.model.layers, kept, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                p(normed).view(rows, end - start, -1, c.head_dim).transpose(1, 2)
                for p in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            keys[:, :, start:end] = rotate(k, cos[start:end], sin[start:end])
            values[:, :, start:end] = v
            q = rotate(q, cos[start:end], sin[start:end])
            seen = F.scaled_dot_product_attention(
                q, keys[:, :, :end], values[:, :, :end], is_causal=start == 0, enable_gqa=True
            )
            x = x + attention.o_proj(seen.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = F.linear(model.model.norm(x[:, -1]), model.model.embed_tokens.weight).float()
        if temperature:
            tokens[:, end] = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)[:, 0]
        else:
            tokens[:, end] = logits.argmax(-1)
        start = end
    return tokens


@torch.no_grad()
def likeliest(model: Llama, tokens: Tensor, count: int = LIKELIEST) -> tuple[Tensor, Tensor]:
    """What comes after each of (B, T) tokens: ids (B, T, count), likeliest first, and their log-probabilities."""
    cos, sin = model.angles(tokens.shape[1])
    found = []
    for rows in tokens.split(ROWS_AT_ONCE):
        with torch.autocast(cos.device.type, torch.bfloat16):
            logits = model(rows, cos, sin)
        found.append(torch.log_softmax(logits.float(), -1).topk(count))
    return torch.cat([f.indices for f in found]), torch.cat([f.values for f in found])
