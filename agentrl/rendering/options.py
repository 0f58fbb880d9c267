"""`chat_template_kwargs`: what a request tells its chat template besides messages and tools, e.g. not to think.

Options are part of the key that a conversation is recognised by (`root_key`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, did_you_mean

PARAM = "chat_template_kwargs"
MAX_OPTIONS = 16
MAX_TEXT = 64
"""Characters of a value that is a string."""
CAPACITY = 64
"""Renderers with options that are kept, of one model."""
RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
)
"""What the proxy decides."""
_ALIKE = ("enable_thinking", "thinking")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def check_options(options: Json | None) -> Json:
    """The options that say something. Raises RequestError 400 for names and values that no template is given."""
    said = {name: value for name, value in (options or {}).items() if value is not None}
    if len(said) > MAX_OPTIONS:
        raise _refused(f"{len(said)} options: at most {MAX_OPTIONS} are taken")
    for name, value in said.items():
        if not _NAME.fullmatch(name):
            raise _refused(f"{name[:MAX_TEXT]!r} is no name of an option")
        if name in RESERVED or name.endswith("_token"):
            raise _refused(f"{name}: is not for the caller to decide")
        if not _is_plain(value):
            raise _refused(f"{name}: must be true, false, a number, or a string of at most {MAX_TEXT} characters")
    return said


def known_options(options: Json, known: Collection[str], format: str, *, reasons: bool) -> Json:
    """The options that a format has, by its own names. Raises RequestError 400 for one that it has not.

    Thinking is `enable_thinking` or `thinking`. Where a format has none of it, it is off already.
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
    """The option by which a format is told whether to think. None where it has none."""
    return next((name for name in _ALIKE if name in known), None)


def with_thinking(options: Json, thinks: bool | None, option: str | None) -> Json:
    """The options with `option` set to `thinks`, unless one of them is None or the options set it themselves."""
    if thinks is None or option is None or any(name in options for name in _ALIKE):
        return options
    return {**options, option: thinks}


def spelled(options: Json) -> str:
    """Options as the key of a memory."""
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
    return RequestError(400, f"{PARAM}: {why}", code="invalid_parameter", param=PARAM)
