"""Renders templates. Every text that a template shows passes through `shown`, so nothing that was recorded can act."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from agentrl.visible import LINES, visible

LONGEST_TEXT = 20_000
"""Characters of one text on a page."""
ASKED = ("prompt", "question", "problem", "instruction", "task", "query")
"""Keys of a task's data that may hold what the agent is asked."""
TYPES = {".css": "text/css", ".js": "text/javascript"}


@dataclass(frozen=True)
class Asset:
    """A style or a script; its URL has the `version`, so that browsers keep it until it changes."""

    content: bytes
    media_type: str

    @cached_property
    def version(self) -> str:
        """A digest of the content."""
        return hashlib.sha256(self.content).hexdigest()[:12]


def render(template: str, **context: Any) -> str:
    """The HTML of a template."""
    return _environment().get_template(template).render(context)


def shown(value: Any) -> Any:
    """The printed form of a value: text of bounded length, of control characters only line ends; numbers rounded."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    text = str(value)
    cut = "" if len(text) <= LONGEST_TEXT else f"… ({len(text) - LONGEST_TEXT:,} more characters)"
    return visible(text[:LONGEST_TEXT], LINES) + cut


def number(value: float | None) -> str:
    """A number for people: four significant digits, thousands apart."""
    if value is None or not math.isfinite(value):
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if not 1e-3 < abs(value) < 1e6:
        return f"{value:.3g}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def percent(value: float | None) -> str:
    """A share for people."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.1%}"


def duration(seconds: float | None) -> str:
    """A length of time: `12 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    for size, name, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            rest = int(seconds % size // below)
            return f"{int(seconds // size)} {name}" + (f" {rest} {small}" if rest else "")
    return f"{seconds:.0f} s"


def when(seconds: float | None) -> Markup:
    """A time, as UTC; a script shows it in the reader's zone."""
    if seconds is None:
        return Markup("–")
    at = datetime.fromtimestamp(seconds, UTC)
    return Markup('<time datetime="{}">{} UTC</time>').format(
        at.isoformat(timespec="milliseconds"), at.strftime("%Y-%m-%d %H:%M:%S")
    )


def first_line(text: str | None, most: int = 160) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(str(text or "").split())
    return line if len(line) <= most else line[: most - 1] + "…"


def brief(value: Any, most: int = 90) -> str:
    """A JSON value on one line: of an object, the first of its texts that says what is asked, if it has one."""
    if isinstance(value, Mapping):
        value = next((value[key] for key in ASKED if isinstance(value.get(key), str) and value[key]), value)
    return first_line(value if isinstance(value, str) else line(value), most)


def indented(value: Any) -> str:
    """A JSON value as text on several lines."""
    return json.dumps(value, ensure_ascii=False, indent=2)


def line(value: Any) -> str:
    """A JSON value as text on one line."""
    return json.dumps(value, ensure_ascii=False)


def query(base: str, given: Mapping[str, Any]) -> str:
    """A URL with those parameters that are set."""
    pairs = [f"{quote(name)}={quote(str(value), safe='')}" for name, value in given.items() if value not in (None, "")]
    return base + ("?" + "&".join(pairs) if pairs else "")


@cache
def assets() -> dict[str, Asset]:
    """The files that browsers load, by their path below `static/`."""
    root = files("agentrl.dashboard") / "static"
    found = {one.name: one for one in root.iterdir()}
    found |= {f"vendor/{one.name}": one for one in (root / "vendor").iterdir()}
    return {
        name: Asset(one.read_bytes(), media_type)
        for suffix, media_type in TYPES.items()
        for name, one in found.items()
        if name.endswith(suffix)
    }


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("agentrl.dashboard"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=shown,
    )
    environment.filters |= {
        "number": number,
        "percent": percent,
        "duration": duration,
        "when": when,
        "first_line": first_line,
        "brief": brief,
        "indented": indented,
        "line": line,
        "part": lambda text: quote(str(text), safe=""),
    }
    environment.globals |= {"query": query, "static": _static}
    return environment


def _static(name: str) -> str:
    return f"/ui/static/{name}?v={assets()[name].version}"
