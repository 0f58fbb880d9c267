"""Check the built documentation in site/: `python scripts/check_site.py`. `make docs` runs it after the build.

The build itself checks links between pages. This checks the rest: links to other files, images, the navigation, and
that no page loads anything over a network. Standard library only.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
LOADED = {("img", "src"), ("script", "src"), ("iframe", "src"), ("source", "src"), ("object", "data"), ("link", "href")}
"""(Element, attribute) pairs whose target a browser fetches without a click."""


def main() -> int:
    """Print every fault; the exit status is 1 if there is one."""
    config = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    docs, site = ROOT / config["docs_dir"], ROOT / config["site_dir"]
    faults = [*unlisted(docs, set(listed(config["nav"]))), *broken(site)]
    print("\n".join(faults) or f"{len(list(site.rglob('*.html')))} pages, every link leads somewhere")
    return bool(faults)


def listed(nav: list[Any]) -> Iterator[str]:
    """The pages of a navigation, in order."""
    for entry in nav:
        for target in entry.values() if isinstance(entry, dict) else [entry]:
            yield from listed(target) if isinstance(target, list) else [target]


def unlisted(docs: Path, pages: set[str]) -> Iterator[str]:
    """Pages that the navigation lacks, and entries of it that have no page."""
    found = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    yield from (f"zensical.toml: the navigation lacks {name}" for name in sorted(found - pages))
    yield from (f"zensical.toml: the navigation has {name}, which does not exist" for name in sorted(pages - found))


def broken(site: Path) -> Iterator[str]:
    """Targets that do not exist, and files that a page would load over a network."""
    pages = {path.resolve(): Page(path.read_text()) for path in site.rglob("*.html")}
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        if name.name == "404.html":  # its links are relative to the address at which it is shown
            continue
        for tag, attribute, url in page.targets:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                if (tag, attribute) in LOADED and parts.scheme != "data":
                    yield f"{name}: loads {url} over a network"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() or not target.is_relative_to(site.resolve()):
                yield f"{name}: {url} does not exist"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                yield f"{name}: {url} has no such anchor"


class Page(HTMLParser):
    """The ids of a page, and the targets of its links and of the files that it loads, as (element, attribute, URL)."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[tuple[str, str, str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src", "data") and value:
                self.targets.append((tag, name, value))


if __name__ == "__main__":
    sys.exit(main())
