"""How much random work tests do, by the environment variable HYPOTHESIS_PROFILE.

quick (make check), usual (make test), default (make test-all), thorough (before a release).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
THOROUGH = PROFILE == "thorough"
# Histories of each state machine.
HISTORIES = {"quick": 10, "usual": 15, "thorough": 1000}.get(PROFILE, 100)


def covering(cases: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of few cases of one test that have each value of each parameter: next is one with most new values."""
    left = {index: {(name, repr(value)) for name, value in case.items()} for index, case in enumerate(cases)}
    chosen = [index for index, values in left.items() if not values]
    while any(left.values()):
        best = max(left, key=lambda index: len(left[index]))
        seen = left.pop(best)
        chosen.append(best)
        left = {index: values - seen for index, values in left.items()}
    return sorted(chosen)
