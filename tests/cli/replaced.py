"""Commands whose work is replaced, to see the options that it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import pytest


def replace_work(command: click.Command, work: Callable[..., int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the function under `on_each_rank` of a command; it gets `machine` and the groups by name."""
    decorated: Any = command.callback
    while "function" not in decorated.__code__.co_freevars or hasattr(decorated.__wrapped__, "__wrapped__"):
        decorated = decorated.__wrapped__
    cell = decorated.__closure__[decorated.__code__.co_freevars.index("function")]
    monkeypatch.setattr(cell, "cell_contents", work)
