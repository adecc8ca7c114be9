"""What users rely on is still there: additions are allowed, losses and changes are not. See `frozen/record.py`."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "frozen"))
import record

FROZEN: dict[str, Any] = json.loads(record.FILE.read_text())
POSITIONAL = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")
VARIABLE = ("VAR_POSITIONAL", "VAR_KEYWORD")


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    return json.loads(json.dumps(record.outside()))  # type: ignore[no-any-return]


def lost(before: Any, now: Any, where: str) -> list[str]:
    """What of `before` is no longer so."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            line
            for name, value in before.items()
            for line in (lost(value, now[name], f"{where} {name}") if name in now else [f"{where} {name}: gone"])
        ]
    if where.endswith(" choices") and before is not None and now is not None:
        return [f"{where} {choice}: gone" for choice in before if choice not in now]
    if where.startswith("names ") and isinstance(before, list) and isinstance(now, list):
        return [f"{where}: {line}" for line in lost_of_call(before, now)]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [line for i, (a, b) in enumerate(zip(before, now, strict=True)) for line in lost(a, b, f"{where} {i}")]
    return [] if before == now else [f"{where}: was {before!r} and is {now!r}"]


def lost_of_call(before: list[list[str]], now: list[list[str]]) -> list[str]:
    """Calls that were right and no longer are, by parameters as name, kind and default."""
    known = {name: [name, kind, default] for name, kind, default in now}
    old = {name for name, _, _ in before}
    changed = [f"{each} is {known.get(each[0])}" for each in before if known.get(each[0]) != each]
    places = [[name for name, kind, _ in each if kind in POSITIONAL] for each in (before, now)]
    if places[1][: len(places[0])] != places[0]:
        changed.append(f"parameters in order were {places[0]} and are {places[1]}")
    needed = [name for name, kind, value in now if value == "required" and kind not in VARIABLE and name not in old]
    return changed + [f"{name} is new and has no default" for name in needed]


@pytest.mark.parametrize("part", sorted(FROZEN))
def test_nothing_of_the_outside_is_lost(part: str, now: dict[str, Any]) -> None:
    assert lost(FROZEN[part], now[part], part) == []


def test_everything_of_now_is_recorded(now: dict[str, Any]) -> None:
    """An addition is part of the outside from then on: `python tests/frozen/record.py` writes it."""
    new = [line.removesuffix(": gone") for part in now for line in lost(now[part], FROZEN[part], part)]
    assert not new, f"new, and not recorded: run python tests/frozen/record.py: {new}"


def test_each_field_is_accepted_and_an_unknown_one_is_not() -> None:
    for path, fields in FROZEN["fields"].items():
        assert set(fields.values()) == {200}, path
        assert "error" in FROZEN["answers"][f"{path}, refused"]


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(outside: dict[str, Any]) -> None:
        for name in path[:-1]:
            outside = outside[name]
        del outside[path[-1]]

    return change


def renamed_parameter(outside: dict[str, Any]) -> None:
    outside["names"]["generate"]["call"][3][0] = "settings"


def other_default(outside: dict[str, Any]) -> None:
    outside["names"]["generate"]["call"][4][2] = "128"


def other_order(outside: dict[str, Any]) -> None:
    call = outside["names"]["generate"]["call"]
    call[3], call[4] = call[4], call[3]


def needed_parameter(outside: dict[str, Any]) -> None:
    outside["names"]["generate"]["call"].insert(6, ["how", "KEYWORD_ONLY", "required"])


def fewer_choices(outside: dict[str, Any]) -> None:
    outside["commands"]["mlx-kv generate"]["--kv-share"]["choices"].remove("adaptive")


def refused_field(outside: dict[str, Any]) -> None:
    outside["fields"]["/v1/completions"]["top_k"] = 400


def other_kind(outside: dict[str, Any]) -> None:
    outside["answers"]["/v1/completions"]["choices"][0]["text"] = "list"


@pytest.mark.parametrize(
    "change",
    [
        without("names", "KVCache"),
        without("names", "KVCache", "attributes", "trim"),
        without("commands", "mlx-kv generate", "--kv-budget"),
        without("commands", "mlx-kv plan"),
        without("answers", "/v1/completions", "usage"),
        without("metrics", "mlx_kv_rows"),
        *(renamed_parameter, other_default, other_order, needed_parameter, fewer_choices, refused_field, other_kind),
    ],
)
def test_a_loss_is_found(change: Callable[[dict[str, Any]], None]) -> None:
    changed = copy.deepcopy(FROZEN)
    change(changed)
    assert [line for part in FROZEN for line in lost(FROZEN[part], changed[part], part)] != []


def test_an_addition_is_none() -> None:
    changed = copy.deepcopy(FROZEN)
    changed["names"]["generate"]["call"].insert(6, ["how", "KEYWORD_ONLY", "None"])
    changed["commands"]["mlx-kv generate"]["--kv-share"]["choices"].append("other")
    changed["answers"]["/v1/completions"]["more"] = "str"
    assert [line for part in FROZEN for line in lost(FROZEN[part], changed[part], part)] == []
