"""scripts/check_site.py finds what the site's generator does not check; links of the pages outside docs/ exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


@pytest.fixture
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_site", ROOT / "scripts" / "check_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(site: Path, name: str, body: str) -> None:
    (site / name).parent.mkdir(parents=True, exist_ok=True)
    (site / name).write_text(f"<html><head></head><body>{body}</body></html>")


def test_sound_links_have_no_fault(checker: ModuleType, tmp_path: Path) -> None:
    write(
        tmp_path, "a.html", '<a href="b/c.html#here">x</a> <a href="#top" id="top">y</a> <a href="https://x.org">z</a>'
    )
    write(tmp_path, "b/c.html", '<h2 id="here">h</h2> <img src="../picture.svg">')
    (tmp_path / "picture.svg").touch()
    assert list(checker.broken(tmp_path)) == []


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="no.html">x</a>', "a.html: no.html does not exist"),
        ('<a href="../outside.html">x</a>', "a.html: ../outside.html does not exist"),
        ('<a href="#no">x</a>', "a.html: #no has no such anchor"),
        ('<img src="no.png">', "a.html: no.png does not exist"),
        ('<script src="https://cdn.org/x.js"></script>', "a.html: loads https://cdn.org/x.js over a network"),
        ('<link href="//fonts.org/x.css">', "a.html: loads //fonts.org/x.css over a network"),
    ],
)
def test_each_fault_is_found(checker: ModuleType, tmp_path: Path, body: str, fault: str) -> None:
    site = tmp_path / "site"
    write(site, "a.html", body)
    (tmp_path / "outside.html").touch()
    assert list(checker.broken(site)) == [fault]


def test_the_navigation_and_the_folder_hold_the_same_pages(checker: ModuleType, tmp_path: Path) -> None:
    for name in ("index.md", "extra.md"):
        (tmp_path / name).touch()
    nav = [{"Home": "index.md"}, {"More": [{"Gone": "gone.md"}]}]
    assert list(checker.unlisted(tmp_path, set(checker.listed(nav)))) == [
        "zensical.toml: the navigation lacks extra.md",
        "zensical.toml: the navigation has gone.md, which does not exist",
    ]


@pytest.mark.parametrize("name", OUTSIDE)
def test_links_of_pages_outside_the_site_exist(name: str) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text())
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_files_that_a_page_names_exist(name: str) -> None:
    """Those of NAME are the reader's own."""
    paths = re.findall(r"`((?:agentrl|proxy|trainer|tests|docs|scripts)/[\w./-]*)`", (ROOT / name).read_text())
    assert paths
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []
