"""docs/architecture.md is true: its picture shows the imports, its names exist, and its examples work.

The examples are run as a stranger would: as modules outside the package, which use public names only.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()

sys.path.append(str(ROOT / "tools"))

import draw_rooms  # noqa: E402

# --- the picture --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("picture", draw_rooms.pictures(), ids=lambda path: path.stem)
def test_the_picture_shows_the_imports(picture: Path) -> None:
    assert draw_rooms.drawn_house(picture) == draw_rooms.read_house(), "draw it again: python tools/draw_rooms.py"
    assert f"({picture.name}#" in PAGE


def test_arrows_lead_down() -> None:
    house = draw_rooms.read_house()
    assert len(house.floors) > 10
    assert all(house.floors[room] < house.floors[other] for room, other in house.arrows)


# --- the names ----------------------------------------------------------------------------------------------------


def test_names_in_the_text_exist() -> None:
    rooms = "|".join(draw_rooms.read_house().floors)
    names = re.findall(rf"`((?:{rooms})\.\w[\w.]*)`", PAGE)
    assert len(names) > 8
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(f"mlx_kv.{module}"), attribute), name
