"""Keys that differ from the usual direction are kept: -cos(k, mean over tokens of k / ||k||).

Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments". The mean is over all live tokens, so it changes with what has been evicted.
"""

import mlx.core as mx

LEAST_NORM = 1e-12


def key_diff(keys: mx.array, values: mx.array, positions: mx.array) -> mx.array:
    keys = keys.astype(mx.float32)
    lengths = mx.maximum(mx.linalg.norm(keys, axis=-1), LEAST_NORM)  # (B, H, n)
    # Two passes over the keys, as matrix products: normalised keys are never stored.
    anchor = (1 / lengths)[:, :, None] @ keys / keys.shape[2]  # (B, H, 1, D)
    along = (keys @ anchor.swapaxes(2, 3))[..., 0]
    return -along / (lengths * mx.maximum(mx.linalg.norm(anchor, axis=-1), LEAST_NORM))
