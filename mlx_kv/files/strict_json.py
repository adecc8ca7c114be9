"""JSON of which nothing is dropped: of a name that is there twice, Python keeps the last value and is silent.

Decides what is no JSON here although Python takes it: such names, NaN, numbers that no float can hold. Knows nothing
about which names there are.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, Never


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


def read_json(raw: bytes) -> Any:
    """JSON as its standard has it, with finite numbers: Python's own takes NaN, and 1e400 for infinity.

    Raises:
        ValueError: it is no JSON, has a number that no float can hold, or a name twice, one of which would be dropped.
        RecursionError: it is nested too deeply.
    """

    def constant(text: str) -> Never:
        raise ValueError(f"{text} is no number there")

    def finite(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"{text[:40]} is too large a number")
        return number

    return json.loads(raw, parse_constant=constant, parse_float=finite, object_pairs_hook=unique_keys)
