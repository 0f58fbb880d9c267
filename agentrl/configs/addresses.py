"""Validates addresses of HTTP servers in a configuration."""

from __future__ import annotations

from urllib.parse import urlsplit


def plain_address(value: str, instead: str = "") -> str:
    """Return an HTTP address without a trailing slash. Raises ValueError for an invalid URL or one with a password."""
    parts = urlsplit(value)
    if "@" in value:
        raise ValueError(f"must not contain a password, because it is stored with the run{instead}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"must be http://HOST… or https://HOST… without a query, got {value!r}")
    return value.rstrip("/")
