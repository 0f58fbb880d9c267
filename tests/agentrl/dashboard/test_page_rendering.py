"""What a template prints: inert, bounded, brief."""

from __future__ import annotations

import hashlib
import math
import re
from importlib.resources import files
from urllib.parse import parse_qs, urlsplit

import pytest
from markupsafe import Markup

from agentrl.dashboard import page_rendering
from agentrl.dashboard.page_rendering import LONGEST_TEXT, duration, first_line, number, percent, query, shown, when

HOSTILE = "<script>x</script>\x1b[31m\u202e\"'><img src=x onerror=x> {{ 7777 * 7777 }}"
TEMPLATES = files("agentrl.dashboard") / "templates"


def test_text_is_escaped_and_control_characters_are_spelled_out() -> None:
    page = page_rendering.render("problem.html", message=HOSTILE, status=400, run=None, title=HOSTILE)
    assert "<script>x" not in page
    assert "<img" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "\\x1b[31m\\u202e" in page
    assert "{{ 7777 * 7777 }}" in page


def test_a_long_text_is_cut_and_says_so() -> None:
    found = shown("x" * (LONGEST_TEXT + 1234))
    assert found == "x" * LONGEST_TEXT + "… (1,234 more characters)"
    assert shown("a\nb\tc") == "a\nb\tc"


def test_markup_passes_and_other_values_are_brief() -> None:
    assert shown(Markup("<b>")) == Markup("<b>")
    assert [shown(one) for one in (None, True, False, 0.5, 7)] == ["–", "yes", "no", "0.5000", "7"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (1.0, "1"), (12345.0, "12,345"), (0.123456, "0.1235"), (12.3456, "12.35"), (1234.56, "1,235"),
        (1e-5, "1e-05"), (2.5e7 + 0.5, "2.5e+07"), (-0.25, "-0.2500"), (math.nan, "–"), (math.inf, "–"), (None, "–"),
    ],
)  # fmt: skip
def test_numbers_have_four_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_shares_times_and_lines() -> None:
    assert (percent(0.1234), percent(None)) == ("12.3%", "–")
    assert [duration(s) for s in (None, -1, 3.21, 42, 200, 7500, 3600, 270_000)] == [
        "–", "0.0 s", "3.2 s", "42 s", "3 min 20 s", "2 h 5 min", "1 h", "3 d 3 h",
    ]  # fmt: skip
    assert when(0.5) == '<time datetime="1970-01-01T00:00:00.500+00:00">1970-01-01 00:00:00 UTC</time>'
    assert when(None) == "–"
    assert first_line(" a\n b  c ") == "a b c"
    assert first_line("x" * 20, 10) == "x" * 9 + "…"
    assert first_line(None) == ""


def test_an_address_carries_any_value() -> None:
    value = 'a&b=c#d?e/f "g" <h> %'
    found = urlsplit(query("/ui/x", {"one": value, "none": None, "empty": "", "two": 3}))
    assert found.path == "/ui/x"
    assert parse_qs(found.query) == {"one": [value], "two": ["3"]}
    assert query("/ui/x", {"a": None}) == "/ui/x"


def test_an_unknown_value_is_a_fault_and_not_an_empty_place() -> None:
    with pytest.raises(Exception, match="'message' is undefined"):
        page_rendering.render("problem.html", status=1, run=None, title="x")


def test_no_template_prints_unescaped_text() -> None:
    for template in TEMPLATES.iterdir():
        text = template.read_text()
        if template.name != "session_file.html":  # one file with its own style and script
            assert not re.search(r"<style|style=|<script(?![^>]*src=)|\son\w+=|javascript:", text), template.name
        assert not re.search(r"\|\s*safe|autoescape", text), template.name


def test_styles_and_scripts_have_the_version_of_their_content() -> None:
    assets = page_rendering.assets()
    assert {"dashboard.css", "page.js", "charts.js", "vendor/uplot.js", "vendor/uplot.css"} <= set(assets)
    for name, asset in assets.items():
        assert asset.media_type == ("text/css" if name.endswith(".css") else "text/javascript")
        assert hashlib.sha256(asset.content).hexdigest().startswith(asset.version)
    assert f"page.js?v={assets['page.js'].version}" in page_rendering.render(
        "problem.html", message="", status=1, run=None, title="x"
    )


def test_vendored_files_are_those_of_their_release() -> None:
    vendor = files("agentrl.dashboard") / "static" / "vendor"
    for line in (vendor / "uplot.sha256").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest
