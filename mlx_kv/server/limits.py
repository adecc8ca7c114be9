"""What a client may take of a server. Knows nothing about how it is kept to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_kv.server.cache_requests import AllowedCache


@dataclass(frozen=True)
class Limits:
    """What a client may take.

    Attributes:
        body_bytes: of a request.
        body_seconds: for all of it to arrive.
        prompt_tokens: None is the context of the model, less one.
        queue: answers that wait for a row; requests for more are turned away.
        max_tokens: where a request does not say.
        slot_folder: where slots are saved; None saves none.
        strict: whether requests with fields that nobody knows are refused.
        cache: what requests may say of how their keys and values are kept.
        template: settings of the chat template, where a request does not say.
    """

    body_bytes: int = 4 * 2**20
    body_seconds: float = 60.0
    prompt_tokens: int | None = None
    queue: int = 64
    max_tokens: int = 512
    strict: bool = False
    cache: AllowedCache = field(default_factory=AllowedCache)
    slot_folder: Path | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
