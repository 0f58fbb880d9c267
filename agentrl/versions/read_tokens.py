"""Tokens that let a host read a version's files from a server, and those of its ancestors, without the server's key.

A token is `UNTIL.NAME.HMAC`: seconds of the epoch, the version's name, and HMAC-SHA256 under the server's key of
"read-version NAME UNTIL". It reads all versions with that number or a lower one, because a host that missed some needs
them.
"""

from __future__ import annotations

import hmac

from agentrl.versions.weights_folder import version_of

MOST_CHARACTERS = 400


def read_token(key: str, name: str, until: int) -> str:
    """The token that reads the version `name` and older ones until then, in seconds of the epoch."""
    return f"{until}.{name}.{_code(key, name, until)}"


def is_read_token(token: str, key: str, name: str, now: float) -> bool:
    """Whether a token reads the version `name` now."""
    parts = token.split(".") if len(token) <= MOST_CHARACTERS and token.isascii() else []
    if len(parts) != 3 or not parts[0].isdecimal() or len(parts[0]) > 15:
        return False
    until, granted, code = int(parts[0]), parts[1], parts[2]
    if not hmac.compare_digest(code, _code(key, granted, until)):
        return False
    wanted, newest = version_of(name), version_of(granted)
    return now <= until and wanted is not None and newest is not None and wanted <= newest


def _code(key: str, name: str, until: int) -> str:
    return hmac.digest(key.encode(), f"read-version {name} {until}".encode(), "sha256").hex()
