"""JSON of which nothing is dropped: of a name that is there twice, Python keeps the last value and is silent.

Decides what is no JSON here although Python takes it: such names, NaN, numbers that no float can hold, and what is
nested so deeply that whoever walks through it would fail. Knows nothing about which names there are.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, Never

MOST_NESTED = 128  # arrays and objects within each other; Python's own bound is on all calls, whoever makes them


class DuplicateKeyError(ValueError):
    """An object has a name twice.

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
    """JSON as its standard has it, with finite numbers: Python's own takes NaN, and 1e400 for infinity.

    Raises:
        ValueError: it is no JSON, is nested too deeply, has a number that no float can hold, or a name twice, one of
            which would be dropped.
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
    begun = (raw.count(b"[") + raw.count(b"{")) if isinstance(raw, bytes) else (raw.count("[") + raw.count("{"))
    if begun > MOST_NESTED and _is_deeper(value, MOST_NESTED):  # few have as many at all
        raise ValueError(too_deep)
    return value


def _is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [one for each in inner for one in each if isinstance(one, dict | list)]
    return bool(level)
