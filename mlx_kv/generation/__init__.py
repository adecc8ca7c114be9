"""Tokens out of a model: mlx-lm's loop over these caches, alone and in batches, and speculation."""
