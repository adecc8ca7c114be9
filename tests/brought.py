"""What another package would bring by an entry point."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_kv.settings import OpenSet


def bring(monkeypatch: pytest.MonkeyPatch, into: OpenSet[Any], group: str, name: str, loaded: Any) -> None:
    """As if another package had an entry point of this group."""

    class Entry:
        def __init__(self) -> None:
            self.name = name

        def load(self) -> Any:
            return loaded

    monkeypatch.setattr("mlx_kv.settings.entry_points", lambda group: [Entry()] if group == wanted else [])
    wanted = group
    monkeypatch.setitem(vars(into), "entries", {})
    monkeypatch.delitem(vars(into), "entries")  # looked for anew, and when the test is over what it was before
    monkeypatch.setattr(into, "_loaded", {})
