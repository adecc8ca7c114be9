"""What the documentation site does beside MkDocs: pages from files outside docs/, and links that work in both places.

Links in Markdown lead from file to file of this checkout, as a forge shows them. Here each is turned into one from page
to page of the site. Decides which files outside docs/ are pages (`PAGES`); a link to any other file of the checkout
takes that file along, and one to nothing fails the build; so does a page that would fetch anything from another host.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "mlx_kv/models/reference/MODEL_CARD.md": "models/reference.md",
    "mlx_kv/models/draft/MODEL_CARD.md": "models/draft.md",
    "mlx_kv/models/recall/MODEL_CARD.md": "models/recall.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")  # the file of [text](file#anchor)
FETCHED = re.compile(r"""<(?:script|img|iframe|source|link)\b[^>]*(?:src|href)=["']?(?:https?:)?//|url\(["']?http""")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages, and the files that pages link to."""
    for source, page in PAGES.items():
        if (file := files.get_file_from_path(page)) is not None:
            files.remove(file)
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for file in list(files.documentation_pages()):
        for target in LINK.findall(file.content_string):
            named = in_site(source_of(file.src_uri), target)
            if files.get_file_from_path(named) is None and not named.startswith("docs/"):
                files.append(File.generated(config, named, abs_src_path=str(ROOT / named)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The links of a page, from page to page."""
    # In GitHub's tables a pipe in code has a backslash; MkDocs would show it.
    markdown = re.sub(r"`[^`\n]*`", lambda code: code[0].replace(r"\|", "|"), markdown)
    source, here = source_of(page.file.src_uri), posixpath.dirname(page.file.src_uri)
    return LINK.sub(lambda link: posixpath.relpath(in_site(source, link[1]), here or "."), markdown)


def on_post_build(config: Any) -> None:
    """Looks for what a page or a style sheet fetches from another host."""
    for file in sorted(Path(config.site_dir).rglob("*")):
        if file.suffix in (".html", ".css") and (found := FETCHED.search(file.read_text(encoding="utf-8"))):
            raise PluginError(f"{file} fetches from another host: {found[0]}")


def source_of(page: str) -> str:
    """The file of this checkout that a page is made from."""
    return SOURCES.get(page, f"docs/{page}")


def in_site(source: str, target: str) -> str:
    """The path in the site of a file that `source` links to as `target`."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if not (ROOT / path).is_file():
        raise PluginError(f"{source} links to {target}: there is no file {path}")
    return PAGES.get(path, path.removeprefix("docs/"))
