"""A wider draft that begins able to copy: it finds where the last two tokens stood before, and says what came next.

Decides which weights are put in by hand. What greedy text asks for most is to go on as it went before, and a small
model takes long to find that out by itself: an induction head (Olsson et al. 2022, "In-context Learning and Induction
Heads") needs two layers that work together. Knows nothing about training, which then moves all of these weights.

The first half of the width is the narrow model. In the second half stand, of each token, a constant and a random code,
and from layer 0 on the codes of the token before and of the one before that, which two new heads bring. In layer 1 two
new heads look for places whose codes before are those of the last tokens, and bring what stands there.
B rows, T tokens, W the narrow width, D the head dim, C the size of a code.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from reference_network import Attention, Llama, RMSNorm
from torch import Tensor

CODE = 20
SHARE = 0.6  # how large a code is in its half, against what stands in the other
BACK = (1, 2)  # how far the new heads of layer 0 look back
FAST, PEAK = 8, 30.0  # of the rotary pairs, those that tell distances apart; the score of the right one for each
SLOW = 12  # the pairs from here on turn so slowly that codes can be compared across the distance of a repetition
SHARPNESS, LOUDNESS = 6.0, 6.0


@torch.no_grad()
def widen(wide: Llama, narrow: Llama, tokens: Tensor, seed: int = 0) -> None:
    """Sets all weights of a model of two layers and twice the width, with two more query heads on one more KV head.

    Args:
        tokens: (B, T) of text, on which sizes are measured.
    """
    width, size = narrow.config.hidden_size, narrow.config.head_dim
    taken_over(wide, narrow)
    before, earlier, own = (slice(start, start + CODE) for start in range(width + 1, width + 1 + 3 * CODE, CODE))
    embedding, narrow_embedding = wide.model.embed_tokens.weight, narrow.model.embed_tokens.weight
    norms = narrow_embedding.norm(dim=1, keepdim=True)  # (V, 1): a norm that follows makes the same of all tokens
    random = torch.randn(len(norms), CODE, generator=torch.Generator().manual_seed(seed))
    embedding[:, width : width + 1] = norms / 6
    embedding[:, own] = SHARE * norms / width**0.5 * F.normalize(random, dim=1) * CODE**0.5
    cos, sin = narrow.angles(tokens.shape[1])
    one = torch.eye(CODE)

    # Layer 0 brings the codes of the tokens before.
    x, y = narrow.model.embed_tokens(tokens), wide.model.embed_tokens(tokens)  # (B, T, W), (B, T, 2 W)
    old, new = narrow.model.layers[0], wide.model.layers[0]
    match_size(new.input_layernorm, x, y)
    read = new.input_layernorm(y)
    look_back(new.self_attn, size, width, float(read[..., width].mean()))
    new.self_attn.v_proj.weight[size : size + CODE, own] = one / read[..., own].std()
    x = x + old.self_attn(old.input_layernorm(x), cos, sin)
    for head, place in ((2, before), (3, earlier)):
        start = head * size
        new.self_attn.o_proj.weight[place, start : start + CODE] = SHARE * mean_size(x) * one
    y = y + new.self_attn(read, cos, sin)
    match_size(new.post_attention_layernorm, x, y)
    x, y = (each + layer.mlp(layer.post_attention_layernorm(each)) for each, layer in ((x, old), (y, new)))

    # Layer 1 finds the place, and brings what stands there.
    old, new = narrow.model.layers[1], wide.model.layers[1]
    match_size(new.input_layernorm, x, y)
    read = new.input_layernorm(y)
    find_again(new.self_attn, size, read, before, earlier, own)
    new.self_attn.v_proj.weight[size : 2 * size, :width] = spelling(narrow, read[..., :width], tokens)
    x = x + old.self_attn(old.input_layernorm(x), cos, sin)
    last = x + old.mlp(old.post_attention_layernorm(x))
    for head in (2, 3):
        start = head * size
        new.self_attn.o_proj.weight[:width, start : start + size] = LOUDNESS / 2 * mean_size(last) * torch.eye(size)
    y = y + new.self_attn(read, cos, sin)
    match_size(new.post_attention_layernorm, x, y)
    y = y + new.mlp(new.post_attention_layernorm(y))
    match_size(wide.model.norm, last, y)
    wide.model.norm.weight[width:] = 0  # codes are not for the output


def taken_over(wide: Llama, narrow: Llama) -> None:
    """The narrow weights in the first places of the wide ones, and zeros elsewhere; norms are ones."""
    own = dict(wide.named_parameters())
    for p in own.values():
        p.fill_(1 if p.ndim == 1 else 0)
    for name, p in narrow.named_parameters():
        own[name][tuple(slice(0, n) for n in p.shape)] = p


def mean_size(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1).sqrt().mean()


def match_size(norm: RMSNorm, x: Tensor, y: Tensor) -> None:
    """The norm of y (.., 2 W) makes of its first half what that of x (.., W) makes of x."""
    norm.weight[: x.shape[-1]] *= (y.pow(2).mean(-1) / x.pow(2).mean(-1)).sqrt().mean()


def look_back(attention: Attention, size: int, constant: int, value: float) -> None:
    """Heads 2 and 3 attend to the token BACK[..] places before: rotations of a constant agree there alone."""
    frequency = frequencies(size)[:FAST]
    weight = (PEAK * size**0.5) ** 0.5 / value
    attention.k_proj.weight[size : size + FAST, constant] = weight
    for head, back in zip((2, 3), BACK, strict=True):
        left, right = head * size, head * size + size // 2
        attention.q_proj.weight[left : left + FAST, constant] = weight * torch.cos(frequency * back)
        attention.q_proj.weight[right : right + FAST, constant] = -weight * torch.sin(frequency * back)


def find_again(attention: Attention, size: int, read: Tensor, before: slice, earlier: slice, own: slice) -> None:
    """Head 2 attends where the last two tokens stood just before, head 3 where the last one did."""
    one, sharp = torch.eye(CODE), SHARPNESS**0.5
    pairs = torch.arange(SLOW, size // 2)
    last, last_but_one = (torch.cat((some, some + size // 2))[:CODE] for some in (pairs[::2], pairs[1::2]))
    attention.k_proj.weight[size + last, before] = sharp / read[..., before].std() * one
    attention.k_proj.weight[size + last_but_one, earlier] = sharp / read[..., earlier].std() * one
    for head in (2, 3):
        attention.q_proj.weight[head * size + last, own] = sharp / read[..., own].std() * one
    attention.q_proj.weight[2 * size + last_but_one, before] = sharp / read[..., before].std() * one


def spelling(narrow: Llama, read: Tensor, tokens: Tensor) -> Tensor:
    """(W, W): what layer 1 reads of a token, as what the output takes for that token and no other; least squares."""
    output = narrow.model.embed_tokens.weight * narrow.model.norm.weight  # (V, W)
    wanted = torch.linalg.solve(output.T @ output, output.T).T * len(output) / output.shape[1]
    read = read.flatten(0, 1)
    gram = read.T @ read + 0.01 * len(read) * torch.eye(read.shape[1])
    return torch.linalg.solve(gram, read.T @ wanted[tokens.flatten()]).T


def frequencies(size: int) -> Tensor:
    return 10000.0 ** (-torch.arange(size // 2) / (size // 2))
