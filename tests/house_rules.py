"""Rules of the house that a linter of imports does not know, over sources as text.

A room is a folder directly under mlx_kv, or a file there. Decides what breaks a rule; knows nothing about where sources
come from, so that a planted fault is found as one in a file.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping

LONGEST_FILE = 1_000  # lines; where one asks whether it is one noun
MOST_IN_ROOT = 10
# Of mlx_kv, as tools/codelines.py counts. A change that raises one says why in its message.
MOST_CODE_LINES = 28_374
MOST_FILES = 140
MOST_WIRING = 0.223  # imports and signatures, of the code lines
# Public for all their underscores: of named tuples, and `os._exit`.
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit"}

Sources = Mapping[str, str]  # by path under mlx_kv


def room(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC and name != "_"


def privates_across_rooms(sources: Sources) -> list[str]:
    """Where a private name is read that another room made."""
    made = _made(sources)
    found = []
    for path, source in sources.items():
        others = set().union(*(names for where, names in made.items() if where != room(path)))
        for line, name, origin in _read(source):
            elsewhere = origin is not None and origin != room(path)
            if elsewhere or (origin is None and name not in made[room(path)] and name in others):
                found.append(f"{path}:{line}: {name}")
    return found


def privates_of_mlx_lm(sources: Sources) -> list[str]:
    """Where a private name is read that nobody of ours made."""
    ours = set().union(*_made(sources).values())
    return [
        f"{path}:{line}: {name}"
        for path, source in sources.items()
        for line, name, origin in _read(source)
        if name not in ours and origin is None
    ]


def too_long(sources: Sources) -> list[str]:
    """Files of more lines than can be read in one sitting."""
    lengths = {path: source.count("\n") for path, source in sources.items()}
    return [f"{path}: {lines} lines" for path, lines in lengths.items() if lines > LONGEST_FILE]


def in_root(sources: Sources) -> list[str]:
    return [path for path in sources if "/" not in path]


@functools.cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def _nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(_parsed(source)))


def _made(sources: Sources) -> dict[str, set[str]]:
    """The private names that each room makes: functions, classes, variables, attributes of its own objects."""
    made: dict[str, set[str]] = defaultdict(set)
    for path, source in sources.items():
        for node in _nodes(source):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _own(node.value):
                name = node.attr
            else:
                continue
            if private(name):
                made[room(path)].add(name)
    return made


def _own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _read(source: str) -> Iterator[tuple[int, str, str | None]]:
    """Private names that are taken from elsewhere: line, name, and the room where an import of ours says it."""
    for node in _nodes(source):
        if isinstance(node, ast.Attribute) and private(node.attr) and not _own(node.value):
            yield node.lineno, node.attr, None
        elif isinstance(node, ast.ImportFrom):
            ours = (node.module or "").split(".")
            for alias in node.names:
                if private(alias.name):
                    yield node.lineno, alias.name, ours[1] if ours[0] == "mlx_kv" and len(ours) > 1 else None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            value, name = node.args[:2]
            by_name = node.func.id in ("getattr", "hasattr", "setattr") and isinstance(name, ast.Constant)
            if by_name and private(str(name.value)) and not _own(value):
                yield node.lineno, str(name.value), None
