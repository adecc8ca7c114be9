"""Fields of requests that nobody here knows.

Decides that they are ignored, with one line in the log for each name, or refused where that was asked for. Knows
nothing about the fields that are known.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from mlx_kv.server.errors import ApiError

MOST_NAMES = 256  # that are said; whoever makes up more of them does not fill the log
log = logging.getLogger("mlx_kv.server")


class UnknownFields:
    """What becomes of them, for all requests to a server.

    Args:
        strict: whether they are refused.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._said: set[str] = set()

    def check(self, names: Iterable[str]) -> None:
        """Raises ApiError, 400, for the first of them where they are refused."""
        for name in sorted(names):
            if self.strict:
                raise ApiError(400, f"unknown field {name[:80]!r}: leave it out", name[:80], "unknown_parameter")
            self.note(
                name, f"requests have an unknown field {name[:80]!r}: it is ignored; --strict refuses such requests"
            )

    def passed_over(self, name: str, fact: str) -> None:
        """Raises ApiError, 400, for a field that is known and has no effect, where such are refused."""
        if self.strict:
            raise ApiError(400, f"{fact}: leave it out", name, "unsupported_parameter")
        self.note(name, f"requests have {name}, which has no effect: {fact}; --strict refuses such requests")

    def note(self, name: str, line: str) -> None:
        """Says a line, if nothing was said of that name before."""
        if name not in self._said and len(self._said) < MOST_NAMES:
            self._said.add(name)
            log.warning("%s", line)
