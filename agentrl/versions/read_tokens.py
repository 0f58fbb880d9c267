"""Tokens that let a host read one version's files from a server, without the server's key.

A token is `UNTIL.HMAC`: seconds of the epoch, and HMAC-SHA256 under the server's key of "read-version NAME UNTIL".
"""

from __future__ import annotations

import hmac


def read_token(key: str, name: str, until: int) -> str:
    """The token that reads the version `name` until then, in seconds of the epoch."""
    return f"{until}.{_code(key, name, until)}"


def is_read_token(token: str, key: str, name: str, now: float) -> bool:
    """Whether a token reads the version `name` now."""
    until, _, code = token.partition(".")
    if not (until.isascii() and until.isdecimal() and len(until) <= 15) or int(until) < now:
        return False
    return hmac.compare_digest(code.encode(), _code(key, name, int(until)).encode())


def _code(key: str, name: str, until: int) -> str:
    return hmac.digest(key.encode(), f"read-version {name} {until}".encode(), "sha256").hex()
