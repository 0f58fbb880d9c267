"""What a client calls itself: the first product of its User-Agent, without a version."""

from __future__ import annotations

import re

from starlette.requests import Request

_PRODUCT = re.compile(r"[A-Za-z][\w.-]{0,39}", re.ASCII)


def client_of(request: Request) -> str | None:
    """`codex_exec` of `codex_exec/0.169.0 (Debian …)`; None where there is no such name."""
    found = _PRODUCT.match(request.headers.get("user-agent", ""))
    return found[0] if found else None
