"""What the description of a saved cache is made of: names, lists, whole numbers; nothing that only looks like them.

Knows nothing about caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_kv.cache.checks import whole_number


def check_parts(told: Mapping[str, Any], parts: set[str]) -> None:
    if told.keys() != parts:
        raise ValueError(f"a cache has {', '.join(sorted(parts))}, and nothing else")


def check_lists(*trees: Any) -> None:
    if not all(type(tree) is list for tree in trees):
        raise ValueError("something else than a list")


def whole(name: str, value: object, least: int = 0) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} is {str(value)[:40]!r}, which is no whole number")
    return whole_number(name, value, least)
