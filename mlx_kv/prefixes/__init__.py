"""Prompts that are kept: what was read once is found again, in memory and on disk."""
