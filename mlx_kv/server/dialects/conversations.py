"""Responses that a later request may go on from, or ask for again: kept in memory, the oldest let go first.

Decides how much is kept. Knows nothing about models; the caches that make going on cheap are kept elsewhere.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from mlx_kv.server.errors import ApiError

MOST_BYTES = 32 * 2**20  # of JSON


@dataclass(frozen=True)
class Kept:
    """A response, and the messages of the chat up to its end."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    nbytes: int


class Conversations:
    """Those of one server.

    Args:
        most_bytes: of all that are kept.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self._nbytes = most_bytes, 0
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def keep(self, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keeps one, if there is room for it at all."""
        nbytes = len(json.dumps(response)) + len(json.dumps(messages))
        if nbytes > self._most_bytes:
            return
        self._kept[response["id"]] = Kept(response, messages, nbytes)
        self._nbytes += nbytes
        while self._nbytes > self._most_bytes:
            self._nbytes -= self._kept.popitem(last=False)[1].nbytes

    def find(self, name: str, param: str | None = None) -> Kept:
        """One by its id.

        Raises:
            ApiError: 404, it is not there, or no longer.
        """
        if name not in self._kept:
            raise ApiError(
                404, f"there is no response {name[:80]!r} here, or no longer: send the whole conversation", param,
                "previous_response_not_found" if param else None,
            )  # fmt: skip
        self._kept.move_to_end(name)
        return self._kept[name]

    def remove(self, name: str) -> None:
        """Raises ApiError, 404, where it is not there."""
        self._nbytes -= self.find(name).nbytes
        del self._kept[name]
