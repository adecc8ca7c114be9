"""Sets that others add to: which of one name is found, and what of other packages is loaded when."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_kv.settings import OpenSet


class Entry:
    """An entry point that says when it was loaded."""

    def __init__(self, name: str, value: Any, loaded: list[str]) -> None:
        self.name, self._value, self._loaded = name, value, loaded

    def load(self) -> Any:
        self._loaded.append(self.name)
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was loaded of another package, which brings two things and one that cannot be used."""
    names: list[str] = []
    brought = {"ours": "theirs", "more": "brought", "broken": ImportError("no such module")}
    entries = [Entry(name, value, names) for name, value in brought.items()]
    monkeypatch.setattr("mlx_kv.settings.entry_points", lambda group: entries if group == "mlx_kv.things" else [])
    return names


def test_what_is_registered_comes_before_what_packages_bring(loaded: list[str]) -> None:
    things = OpenSet("thing", "one", {"ours": "ours"}, lambda name, value: f"{value} as {name}")
    assert things.names() == ["broken", "more", "ours"]
    assert things.find("ours") == "ours"
    assert things.find("more") == "brought as more"
    things.registered["more"] = "registered"
    assert things.find("more") == "registered"


def test_packages_are_loaded_once_and_only_when_they_are_asked_for(loaded: list[str]) -> None:
    things: OpenSet[str] = OpenSet("thing", "one", {"ours": "ours"})
    things.names()
    things.find("ours")
    assert loaded == []
    assert things.find("more") == things.find("more") == "brought"
    assert loaded == ["more"]
    with pytest.raises(ImportError, match="no such module"):
        things.find("broken")
    assert things.find("more") == "brought"


def test_a_name_that_nobody_has_is_refused_with_the_mend(loaded: list[str]) -> None:
    things: OpenSet[str] = OpenSet("thing", "one", {"ours": "ours"})
    message = (
        r"^there is no thing 'x': choose one of broken, more, ours, give one, or register_thing\(\) one of that name$"
    )
    with pytest.raises(ValueError, match=message):
        things.find("x")
