"""Speculative decoding: a drafter proposes, one pass of the model decides."""

# Default number for each pass of the model: mlx-lm's with a draft model, and a larger one for drafters without a model.
DRAFT_TOKENS, LOOKUP_TOKENS = 3, 10
LOOKUP_MIN, LOOKUP_MAX = 2, 4  # tokens that must be alike before their continuation is proposed, and looked for at most
