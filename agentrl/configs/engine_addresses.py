"""Addresses of engines. One may name the engine's backend: `vllm+http://HOST:PORT`. So one run may have both kinds.

Elsewhere, in the store too, an engine is known by its URL without the prefix.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from agentrl.configs.section import plain_address

BackendName = Literal["sglang"]
"""A kind of server: a name of `agentrl.engine.backends.BACKENDS`."""
NAMES: tuple[BackendName, ...] = get_args(BackendName)


class EngineAddress(NamedTuple):
    """The URL of an engine, without a trailing slash, and its backend; None: that of the run."""

    url: str
    backend: BackendName | None = None


def engine_address(text: str, instead: str = "") -> EngineAddress:
    """Parse an address. Raises ValueError for an unknown backend, an invalid URL, and one with a password."""
    prefix, url = _split(text)
    backend = next((name for name in NAMES if name == prefix), None)
    if prefix is not None and backend is None:
        raise ValueError(f"names the backend {prefix[:40]!r}, but there are {', '.join(NAMES)}")
    return EngineAddress(plain_address(url, instead), backend)


def engine_url(text: str) -> str:
    """The URL of an address, which is not checked."""
    return _split(text)[1].rstrip("/")


def _split(text: str) -> tuple[str | None, str]:
    prefix, plus, rest = text.partition("+")
    return (prefix, rest) if plus and "/" not in prefix else (None, text)
