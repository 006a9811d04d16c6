"""Adds Markdown pages from outside docs/ to the site, and points links at them.

On a code host a page links to files beside it, such as ../CONTRIBUTING.md. The site has those that the
navigation names, under their path in the repository. README.md is its home page. Of other files of the
repository the site shows the name without a link.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
HOME = "README.md"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
ALIASES = {"passes/": "rewriter/passes/"}
"""Links in the top folder to folders of the package."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts new pages of docs/, which the navigation does not place, at its end."""
    placed = set(_pages(config.nav))
    more = [path.name for path in sorted(Path(config.docs_dir).glob("*.md")) if path.name not in placed]
    if more and config.nav is not None:
        config.nav.append({"More": more})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the navigation that docs/ does not have."""
    from mkdocs.structure.files import File

    for uri in _pages(config.nav):
        source = HOME if uri == "index.md" else uri
        if files.get_file_from_path(uri) is None and (ROOT / source).is_file():
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between pages of the site."""
    here = page.file.src_uri
    path = HOME if here == "index.md" else here if page.file.generated_by else f"docs/{here}"

    def target(link: re.Match[str]) -> str:
        image, text, written, anchor = link.groups(default="")
        name = posixpath.normpath(posixpath.join(posixpath.dirname(path), written))
        if not (ROOT / name).exists():
            return link.group()  # MkDocs reports it
        uri = _uri(name)
        if files.get_file_from_path(uri) is None:
            return text if text.startswith("`") else f"{text} (`{name}`)"
        return f"{image}[{text}]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(target, markdown)


def _uri(name: str) -> str:
    """Page or file of the site that a file of the repository becomes."""
    for alias, folder in ALIASES.items():
        if name.startswith(alias):
            return folder + name.removeprefix(alias)
    return "index.md" if name == HOME else name.removeprefix("docs/")


def _pages(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for below in nav.values():
            yield from _pages(below)
    elif isinstance(nav, list):
        for below in nav:
            yield from _pages(below)
