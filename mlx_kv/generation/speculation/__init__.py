"""Speculative decoding: a drafter proposes, one pass of the model decides."""
