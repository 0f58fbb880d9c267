"""The name of a client's library or program: the first product of its User-Agent, without the version."""

from __future__ import annotations

import re

from starlette.requests import Request

_PRODUCT = re.compile(r"[A-Za-z][\w.-]{0,39}", re.ASCII)


def client_of(request: Request) -> str | None:
    """`codex_exec` for `codex_exec/0.169.0 (Debian …)`; None without such a name."""
    found = _PRODUCT.match(request.headers.get("user-agent", ""))
    return found[0] if found else None
