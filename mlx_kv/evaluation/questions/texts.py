"""Real prose and real code to ask about: the reference that Python brings along, and modules of its library.

Decides which texts these are, and how they are cut into paragraphs and functions. Knows nothing about tokens or tasks.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MODULES = (
    *("textwrap", "shlex", "heapq", "bisect", "calendar", "glob", "posixpath", "genericpath", "random"),
    *("statistics", "copy", "fnmatch", "difflib", "inspect", "locale", "pprint", "shutil", "tempfile", "timeit"),
    *("mimetypes", "netrc", "quopri", "base64", "colorsys", "ast", "dis", "gettext", "getopt", "keyword", "linecache"),
)
SENTENCE_WORDS = 8  # and more make a paragraph of prose
FUNCTION_LINES = (4, 40)


@dataclass(frozen=True)
class Function:
    """A function of a module: its name and its source."""

    name: str
    source: str


@dataclass(frozen=True)
class Texts:
    """What tasks ask about: paragraphs of prose in their order, and functions in theirs."""

    prose: tuple[str, ...]
    functions: tuple[Function, ...]


def paragraphs(text: str) -> list[str]:
    """Those of prose, each in one line: no headings, tables or code, which are indented or short."""
    found = []
    for block in text.split("\n\n"):
        lines = block.strip("\n").splitlines()
        if lines and not any(line[:1].isspace() or line[:3] in ("***", "===", "---", "| -", "```") for line in lines):
            line = " ".join(" ".join(lines).split())
            if len(line.split()) >= SENTENCE_WORDS and not line.startswith(("|", "#", "-", "*")):
                found.append(line)
    return found


def functions_of(source: str) -> list[Function]:
    """The functions at the top of a module that are neither very short nor very long."""
    found, lines = [], source.splitlines()
    least, most = FUNCTION_LINES
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            own = lines[node.lineno - 1 : node.end_lineno]
            if least <= len(own) <= most:
                found.append(Function(node.name, "\n".join(own)))
    return found


@cache
def python_texts(prose: tuple[Path, ...] = ()) -> Texts:
    """The reference and the library that come with this Python; other prose in the reference's place if given.

    Raises:
        OSError, UnicodeError: a file that cannot be read.
        ValueError: this Python comes without them.
    """
    written = [path.read_text(encoding="utf-8") for path in prose]
    if not written:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise ValueError("this Python comes without its reference: give a text") from error
        written = [topics[name] for name in sorted(topics)]
    functions: list[Function] = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.has_location and spec.origin:
            functions += functions_of(Path(spec.origin).read_text(encoding="utf-8"))
    if not functions:
        raise ValueError("this Python comes without the source of its library")
    return Texts(tuple(line for text in written for line in paragraphs(text)), tuple(functions))
