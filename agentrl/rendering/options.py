"""`chat_template_kwargs`: the template options of a request, for example to disable thinking.

Options are part of a conversation's key (`root_key`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, bad_parameter, did_you_mean

PARAM = "chat_template_kwargs"
MAX_OPTIONS = 16
MAX_TEXT = 64
"""Maximum characters of a string value."""
CAPACITY = 64
"""Renderers with options to cache per model."""
RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
)
"""Variables reserved for the proxy."""
_ALIKE = ("enable_thinking", "thinking")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def check_options(options: Json | None) -> Json:
    """Return the non-null options. Raises RequestError 400 for invalid names and values."""
    given_options = {name: value for name, value in (options or {}).items() if value is not None}
    if len(given_options) > MAX_OPTIONS:
        raise _refused(f"{len(given_options)} options: at most {MAX_OPTIONS} are taken")
    for name, value in given_options.items():
        if not _NAME.fullmatch(name):
            raise _refused(f"{name[:MAX_TEXT]!r} is not an option's name")
        if name in RESERVED or name.endswith("_token"):
            raise _refused(f"{name}: cannot be set by a request")
        if not _is_plain(value):
            raise _refused(f"{name}: must be true, false, a number, or a string of at most {MAX_TEXT} characters")
    return given_options


def known_options(options: Json, known: Collection[str], format: str, *, reasons: bool) -> Json:
    """Map options to the format's own names. Raises RequestError 400 for an unknown option.

    Thinking is `enable_thinking` or `thinking`. In a format without reasoning it is already off.
    """
    chosen: Json = {}
    for name, value in options.items():
        own = (thinking_option(known) or name) if name in _ALIKE else name
        if own in known:
            chosen[own] = value
        elif name not in _ALIKE or value is not False or reasons:
            names = ", ".join(sorted(known)) or "none"
            raise _refused(
                f"the chat format {format!r} has no option {name!r}{did_you_mean(name, sorted(known))} (it has {names})"
            )
    return chosen


def thinking_option(known: Collection[str]) -> str | None:
    """The option that enables thinking; None without one."""
    return next((name for name in _ALIKE if name in known), None)


def with_thinking(options: Json, thinks: bool | None, option: str | None) -> Json:
    """Set `option` to `thinks`, unless either is None or the options set it already."""
    if thinks is None or option is None or any(name in options for name in _ALIKE):
        return options
    return {**options, option: thinks}


def spelled(options: Json) -> str:
    """Options as a cache key."""
    return json.dumps(options, sort_keys=True)


def _is_plain(value: Any) -> bool:
    match value:
        case bool():
            return True
        case int() | float():
            return abs(value) < 1 << 53 and math.isfinite(value)
        case str():
            return len(value) <= MAX_TEXT and value.isprintable()
    return False


def _refused(why: str) -> RequestError:
    return bad_parameter(PARAM, f"{PARAM}: {why}")
