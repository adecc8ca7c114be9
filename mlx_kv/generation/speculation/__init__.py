"""Speculative decoding: a drafter proposes, one pass of the model decides."""

# For each pass of the model, where nobody says: mlx-lm's number, and what is proposed where that takes no model.
DRAFT_TOKENS, LOOKUP_TOKENS = 3, 10
LOOKUP_MIN, LOOKUP_MAX = 2, 4  # tokens that must be alike before their continuation is proposed, and looked for at most
