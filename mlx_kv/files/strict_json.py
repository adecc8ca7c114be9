"""Strict JSON: no duplicate names, of which Python keeps the last value, no NaN or infinity, no deep nesting."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, Never

MOST_NESTED = 128  # arrays and objects within each other; Python's own bound depends on the depth of all calls


class DuplicateKeyError(ValueError):
    """An object with a duplicate name.

    Attributes:
        key: the name.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"{key[:80]!r} is there twice: send it once")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of its pairs: the `object_pairs_hook` of `json.loads`.

    Raises:
        DuplicateKeyError: a name is there twice.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        ((most, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise DuplicateKeyError(most)
    return made


def read_json(raw: bytes | str) -> Any:
    """Parses JSON of finite numbers: Python's own parser accepts NaN, and 1e400 as infinity.

    Raises:
        ValueError: it is no JSON, is nested too deeply, has a number that no float can hold, or a duplicate name.
    """

    def constant(text: str) -> Never:
        raise ValueError(f"{text} is no number there")

    def finite(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"{text[:40]} is too large a number")
        return number

    too_deep = f"it is nested more than {MOST_NESTED} deep"
    try:
        value = json.loads(raw, parse_constant=constant, parse_float=finite, object_pairs_hook=unique_keys)
    except RecursionError:
        raise ValueError(too_deep) from None
    opened = (raw.count(b"[") + raw.count(b"{")) if isinstance(raw, bytes) else (raw.count("[") + raw.count("{"))
    if opened > MOST_NESTED and _is_deeper(value, MOST_NESTED):  # most JSON has fewer
        raise ValueError(too_deep)
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [one for each in inner for one in each if isinstance(one, dict | list)]
    return bool(level)
