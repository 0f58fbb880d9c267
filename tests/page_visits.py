"""Opens pages of the dashboard as a signed-in browser does, and reads their tables."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from html import unescape

from starlette.testclient import TestClient

from agentrl.dashboard import own_server
from agentrl.store import Database

KEY = "a key"
HOSTILE = (
    "</td><script>owned()</script><img src=x onerror=owned()> \x1b[31mred\x1b[0m \u202eesrever\u202c {{ 7777 * 7777 }}"
)
ALIVE = ("<script>owned", "<img", "\x1b", "\u202e")
"""What a page has if it shows HOSTILE as something else than text."""


@dataclass(frozen=True)
class Answer:
    """What the server answers."""

    status_code: int
    text: str


def visit(db: Database, path: str) -> Answer:
    """The page at this path below `/ui`, made anew."""
    with TestClient(own_server.application(db, KEY)) as browser:
        browser.post("/ui/sign-in", data={"key": KEY, "next": "/ui/"})
        found = browser.get(f"/ui{path}")
        return Answer(found.status_code, found.text)


def page(db: Database, path: str) -> str:
    """The HTML of a page that is there."""
    found = visit(db, path)
    assert found.status_code == 200, found.text
    check(found.text)
    return found.text


def check(html: str) -> None:
    """What every page keeps to: no inline code or style, headings in order, tables with named cells."""
    assert not [alive for alive in ALIVE if alive in html]
    assert re.findall(r"<script(?![^>]* src=)|<style|\sstyle=|<[^>]*\son[a-z]+=\"", html) == []
    levels = [int(level) for level in re.findall(r"<h([1-6])", html)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert "<th>" not in html
    ids = re.findall(r'\sid="([^"]*)"', html)
    assert len(ids) == len(set(ids))


def tables(html: str) -> dict[str, list[list[str]]]:
    """The rows of each table, as the texts of their cells, by the name of its region."""
    found = {}
    for name, inside in re.findall(r'role="region" aria-label="([^"]*)"[^>]*>\s*<table[^>]*>(.*?)</table>', html, re.S):
        body = inside.split("<tbody>")[1]
        found[unescape(name)] = [
            [text(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S)]
            for row in re.findall(r"<tr[^>]*>(.*?)</tr>", body, re.S)
        ]
    return found


def text(html: str) -> str:
    """The text of some HTML, on one line."""
    return " ".join(unescape(re.sub(r"<[^>]*>", "", html)).split())


def links(html: str) -> list[str]:
    """Where the page's links lead."""
    return [unescape(href) for href in re.findall(r'<a[^>]* href="([^"]*)"', html)]
