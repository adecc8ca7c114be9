"""Speculative decoding: a drafter proposes, one pass of the model decides."""

DRAFT_TOKENS = 3  # for each pass of the model, where nobody says: mlx-lm's number
