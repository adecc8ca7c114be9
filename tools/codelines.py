"""Lines of code by package folder: `python tools/codelines.py [FOLDER]`, mlx_kv if no folder is named.

A line of code has a token that is neither a comment nor part of a docstring, so comments, docstrings and blank lines
cost nothing. Imports and signatures (decorators apart) are counted as well: they are the wiring between functions, and
their share grows with the number of small files. tests/test_rooms.py fails above the limits in tests/house_rules.py.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "mlx_kv"
LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@dataclass(frozen=True)
class Count:
    lines: int = 0
    files: int = 0
    imports: int = 0  # lines
    signatures: int = 0  # lines

    @property
    def wiring(self) -> float:
        """The share of the lines that are imports or signatures, 0 to 1."""
        return (self.imports + self.signatures) / max(self.lines, 1)

    def __add__(self, other: Count) -> Count:
        return Count(
            self.lines + other.lines,
            self.files + other.files,
            self.imports + other.imports,
            self.signatures + other.signatures,
        )


def has_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return ast.get_docstring(node, clean=False) is not None


def count_source(source: str) -> Count:
    """What one file holds."""
    lines, imports, signatures = set[int](), set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT and token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            signatures.update(range(node.lineno, node.body[0].lineno))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and has_docstring(node):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return Count(len(lines), 1, len(imports & lines), len(signatures & lines))


def count_folder(folder: Path) -> dict[str, Count]:
    """By the folders directly in it; its own files are `.`."""
    found: dict[str, Count] = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        name = parts[0] if len(parts) > 1 else "."
        found[name] = found.get(name, Count()) + count_source(path.read_text(encoding="utf-8"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[1], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=PACKAGE, help="of the sources; mlx_kv if left out")
    folder = parser.parse_args(arguments).folder
    found = count_folder(folder)
    if not found:
        parser.error(f"{folder} has no Python files")
    print(f"{'':<14}{'lines':>8}{'files':>7}{'imports':>9}{'signatures':>12}{'wiring':>8}")
    for name, count in (*found.items(), ("total", sum(found.values(), Count()))):
        numbers = f"{count.lines:>8,}{count.files:>7,}{count.imports:>9,}{count.signatures:>12,}{count.wiring:>8.1%}"
        print(f"{name:<14}{numbers}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
