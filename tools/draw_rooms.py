"""docs/rooms-light.svg and docs/rooms-dark.svg, the rooms of the package: `python tools/draw_rooms.py`.

Rooms, floors and arrows come from the imports themselves (grimp), what stands in a room from its docstring; only the
columns in which it lies are said here. A room lies one floor below the lowest that imports it. An arrow that follows
from others is left out: where a room imports B and B imports C, it may import C. Each picture carries what it shows
(`data-` attributes), which a test compares with the imports.
"""

from __future__ import annotations

import ast
import textwrap
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
# The first column of each room, and how many it takes, of six.
COLUMNS = {
    "cli": (0, 6),
    "calibration": (0, 1.5),
    "inspection": (0, 1.5),
    "planning": (1.5, 1),
    "server": (1.5, 1.8),
    "plots": (3.3, 0.9),
    "bundled": (4.2, 0.9),
    "blas": (5.1, 0.9),
    "ranks": (1, 1.5),
    "prefixes": (2, 4),
    "generation": (0, 3.5),
    "files": (2.2, 3.8),
    "mlxlm": (0, 3.5),
    "policy": (0, 2.2),
    "cache": (0, 6),
    "policy_settings": (0, 2.2),
    "settings": (0, 4),
    "communicator": (4, 2),
}
COLUMN, GAP, MARGIN, ROOF, LINE = 172, 36, 22, 92, 16  # pixels
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Colours:
    wall: str
    room: str
    edge: str
    name: str
    words: str
    inner: str
    arrow: str


LIGHT = Colours("#f4f7f9", "#ffffff", "#b9c7d3", "#12304a", "#52636f", "#dff0ee", "#3d7f86")
DARK = Colours("#182129", "#22303b", "#42586a", "#e3eef5", "#a3b5c2", "#1f4a4b", "#63c5bf")


@dataclass(frozen=True)
class House:
    """Rooms by name.

    Attributes:
        floors: of each, from 0 down.
        inner: the packages inside of each, "outer/inner" where they are nested.
        arrows: (from, to): imports that do not follow from others.
    """

    floors: dict[str, int]
    inner: dict[str, list[str]]
    arrows: set[tuple[str, str]]


def read_house() -> House:
    """The package as its imports are now.

    Raises:
        ValueError: rooms import each other in a circle.
    """
    graph = grimp.build_graph("mlx_kv", cache_dir=None)
    rooms = sorted(name.removeprefix("mlx_kv.") for name in graph.find_children("mlx_kv"))
    below = {room: {other for other in rooms if other != room and imports(graph, room, other)} for room in rooms}
    floors: dict[str, int] = {}
    while len(floors) < len(rooms):
        above = {room: [other for other in rooms if room in below[other]] for room in rooms if room not in floors}
        ready = [room for room, others in above.items() if floors.keys() >= set(others)]
        if not ready:
            raise ValueError(f"rooms import each other in a circle, or are reached from one: {', '.join(above)}")
        floors |= {room: 1 + max((floors[other] for other in above[room]), default=-1) for room in ready}

    def reached(room: str) -> set[str]:
        return below[room].union(*map(reached, below[room]))

    arrows = {(room, other) for room in rooms for other in below[room] - set().union(*map(reached, below[room]))}
    inner: dict[str, list[str]] = {room: [] for room in rooms}
    for file in sorted((ROOT / "mlx_kv").glob("*/**/__init__.py")):
        room, *nested = file.parent.relative_to(ROOT / "mlx_kv").parts
        if nested:
            inner[room].append("/".join(nested))
    return House(floors, inner, arrows)


def imports(graph: grimp.ImportGraph, room: str, other: str) -> bool:
    return graph.direct_import_exists(importer=f"mlx_kv.{room}", imported=f"mlx_kv.{other}", as_packages=True)


def drawn_house(picture: Path) -> House:
    """The house that a picture shows."""
    root = ET.parse(picture).getroot()
    rooms = {each.attrib["data-room"]: each.attrib for each in root.iter() if "data-room" in each.attrib}
    arrows = {(each.attrib["data-from"], each.attrib["data-to"]) for each in root.iter() if "data-from" in each.attrib}
    floors = {name: int(room["data-floor"]) for name, room in rooms.items()}
    return House(floors, {name: room["data-inner"].split() for name, room in rooms.items()}, arrows)


def what_it_is(room: str) -> str:
    """The first sentence of a room's docstring."""
    path = ROOT / "mlx_kv" / room
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    words = " ".join((ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].split())
    return words.partition(". ")[0].rstrip(".").replace("`", "")


def draw(house: House, colours: Colours) -> str:
    """The picture, as SVG."""
    floors = 1 + max(house.floors.values())
    if missing := sorted(set(house.floors) - set(COLUMNS)):
        raise ValueError(f"{', '.join(missing)}: give each room its columns in tools/draw_rooms.py")

    def left(room: str) -> float:
        return MARGIN + COLUMNS[room][0] * COLUMN + GAP / 4

    def right(room: str) -> float:
        return left(room) + COLUMNS[room][1] * COLUMN - GAP / 2

    said = {room: lines_of(what_it_is(room), int((right(room) - left(room) - 24) / 6.4)) for room in house.floors}
    heights = [
        40 + LINE * max(len(said[room]) for room, on in house.floors.items() if on == floor) for floor in range(floors)
    ]

    def ceiling(room: str) -> float:
        return ROOF + sum(heights[: house.floors[room]]) + house.floors[room] * GAP + GAP / 2

    def ground(room: str) -> float:
        return ceiling(room) + heights[house.floors[room]]

    width, height = 2 * MARGIN + 6 * COLUMN, ROOF + sum(heights) + floors * GAP + MARGIN / 2
    root = ET.Element(
        "svg",
        {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width} {height}", "font-family": FONT, "role": "img"},
    )
    ET.SubElement(root, "title").text = "The rooms of mlx_kv, and which imports which"
    eaves, ridge = ROOF - 6, 8
    wall = {"fill": colours.wall, "stroke": colours.edge, "stroke-linejoin": "round"}
    house_outline = (
        f"M 4 {eaves} L {width / 2} {ridge} L {width - 4} {eaves} H {width - MARGIN / 2} V {height - 4} "
        f"H {MARGIN / 2} V {eaves} Z"
    )
    ET.SubElement(root, "path", {"d": house_outline, **wall})
    write(root, width / 2, eaves - 30, "mlx_kv", 22, colours.name, "middle", "700")
    write(
        root, width / 2, eaves - 10, "the public names, each loaded when it is first used", 13, colours.words, "middle"
    )

    for room, floor in sorted(house.floors.items(), key=lambda item: (item[1], COLUMNS[item[0]])):
        data = {"data-room": room, "data-floor": str(floor), "data-inner": " ".join(house.inner[room])}
        group = ET.SubElement(root, "g", data)
        x, y, wide = left(room), ceiling(room), right(room) - left(room)
        frame = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{wide:g}", "height": str(heights[floor]), "rx": "9"}
        ET.SubElement(group, "rect", {**frame, "fill": colours.room, "stroke": colours.edge})
        write(group, x + 14, y + 25, room, 17, colours.name, weight="700")
        beside = x + 14 + 10.5 * len(room) + 10
        for name in house.inner[room]:
            label = name.replace("/", ": ")
            chip = {"x": f"{beside:g}", "y": f"{y + 10:g}", "width": f"{6.6 * len(label) + 16:g}", "height": "20"}
            ET.SubElement(group, "rect", {**chip, "rx": "10", "fill": colours.inner})
            write(group, beside + 8, y + 24.5, label, 12.5, colours.name)
            beside += 6.6 * len(label) + 22
        for number, line in enumerate(said[room]):
            write(group, x + 14, y + 45 + LINE * number, line, 12.5, colours.words)

    taken: list[tuple[float, float, float]] = []  # where arrows go down already: x, from, to
    for source, target in sorted(
        house.arrows, key=lambda arrow: (house.floors[arrow[1]] - house.floors[arrow[0]], arrow)
    ):
        start, end = ground(source), ceiling(target)
        between = [
            (left(room) - 10, right(room) + 10)
            for room, floor in house.floors.items()
            if house.floors[source] < floor < house.floors[target]
        ]
        between += [(x - 16, x + 16) for x, above, below in taken if above < end and start < below]
        low, high = max(left(source), left(target)) + 18, min(right(source), right(target)) - 18
        x = free_place(low, high, between)
        if x is None:
            raise ValueError(f"no room for an arrow from {source} to {target}: give them other columns")
        taken.append((x, start, end))
        line = {"d": f"M {x:g} {start:g} V {end - 7:g}", "fill": "none", "stroke": colours.arrow, "stroke-width": "1.8"}
        group = ET.SubElement(root, "g", {"data-from": source, "data-to": target})
        ET.SubElement(group, "path", line)
        head = f"M {x - 5:g} {end - 9:g} L {x:g} {end - 1:g} L {x + 5:g} {end - 9:g} Z"
        ET.SubElement(group, "path", {"d": head, "fill": colours.arrow})
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def lines_of(words: str, characters: int) -> list[str]:
    """At most four lines; what comes after the last commas is left out where it does not fit."""
    while len(lines := textwrap.wrap(words, characters)) > 4:
        words = words.rpartition(",")[0] or " ".join(lines[:4])
    return lines


def free_place(low: float, high: float, closed: list[tuple[float, float]]) -> float | None:
    """The middle of the widest stretch from low to high that lies in no closed one."""
    edges = sorted(
        [(low, low), (high, high), *((max(low, a), min(high, b)) for a, b in closed if a < high and b > low)]
    )
    best, reach = (0.0, low), low
    for begin, end in edges:
        best = max(best, (begin - reach, (begin + reach) / 2))
        reach = max(reach, end)
    return best[1] if best[0] > 0 else None


def write(
    parent: ET.Element,
    x: float,
    y: float,
    words: str,
    size: float,
    fill: str,
    anchor: str = "start",
    weight: str = "400",
) -> None:
    place = {"x": f"{x:g}", "y": f"{y:g}", "font-size": f"{size:g}", "text-anchor": anchor}
    ET.SubElement(parent, "text", {**place, "font-weight": weight, "fill": fill}).text = words


def pictures() -> dict[Path, Colours]:
    return {ROOT / "docs" / "rooms-light.svg": LIGHT, ROOT / "docs" / "rooms-dark.svg": DARK}


if __name__ == "__main__":
    for picture, colours in pictures().items():
        picture.write_text(draw(read_house(), colours), encoding="utf-8")
