"""How much of a prompt is read between two tokens of the rows that decode: as much as a wait may take.

Decides the size of a chunk from how long those before it took. Only where chunks change nothing that is kept: a budget
evicts after each, and a `quantized_start` takes effect after one. Knows nothing about models, rows or clocks.
"""

from __future__ import annotations

LEAST_CHUNK = 64  # below, weights are read too often for what is gained
FIRST_CHUNK = 128  # while nobody knows how fast the device is


class PrefillPace:
    """Sizes of chunks.

    Args:
        most_seconds: that a pass may take while rows decode.
        most_tokens: of one prompt in one pass.
    """

    def __init__(self, most_seconds: float, most_tokens: int) -> None:
        self._most_seconds, self._most_tokens = most_seconds, most_tokens
        self._per_token: float | None = None  # seconds, in the last pass

    def chunk(self, prompts: int) -> int:
        """Tokens of each of so many prompts that are read in one pass, beside rows that decode."""
        if self._per_token is None:
            fits = FIRST_CHUNK
        else:
            fits = int(min(self._most_seconds / self._per_token, 1e9)) // max(1, prompts)
        return min(self._most_tokens, max(LEAST_CHUNK, fits // LEAST_CHUNK * LEAST_CHUNK))

    def took(self, tokens: int, seconds: float) -> None:
        """A pass over so many tokens of prompts took so long. Short ones say little."""
        if tokens >= LEAST_CHUNK and seconds > 0:
            self._per_token = seconds / tokens
