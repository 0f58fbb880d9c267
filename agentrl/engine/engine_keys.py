"""The keys of engines: with a key a client can sample from an engine, pause it and load weights into it.

They are in the environment alone, never in a URL or on a command line:

    AGENTRL_ENGINE_KEY     what an engine that starts asks for, and what ours send to every engine of no other key
    AGENTRL_ENGINE_KEYS    what ours send to single engines: {"http://gpu-3:30000": "…"}

A key is sent as a bearer token (`--api-key` of SGLang); one with a colon is `user:password`, for a server in front.
"""

from __future__ import annotations

import json
import secrets
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

from agentrl.configs.addresses import plain_address
from agentrl.environment import ENGINE_KEY, ENGINE_KEYS, is_loopback, key_from
from agentrl.errors import ConfigError


def new_key() -> str:
    """A random key of one engine."""
    return f"arl-engine-{secrets.token_urlsafe(24)}"


def authorization(key: str | None) -> dict[str, str]:
    """The header that carries a key."""
    if key is None:
        return {}
    if ":" in key:
        return {"Authorization": f"Basic {b64encode(key.encode()).decode()}"}
    return {"Authorization": f"Bearer {key}"}


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """Which engine gets which key."""

    common: str | None = field(default=None, repr=False)
    by_url: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Raises ConfigError for what are no keys."""
        raw = env.get(ENGINE_KEYS) or "{}"
        try:
            by_url = json.loads(raw)
        except json.JSONDecodeError:
            by_url = None
        if not isinstance(by_url, dict) or not all(isinstance(key, str) for key in by_url.values()):
            raise ConfigError(f'{ENGINE_KEYS}: must be a JSON object, {{"http://HOST:PORT": "KEY"}}')
        for key in by_url.values():
            key_from({ENGINE_KEYS: key}, ENGINE_KEYS)
        return cls(key_from(env, ENGINE_KEY), {url.rstrip("/"): key for url, key in by_url.items()})

    def of(self, url: str) -> str | None:
        """An engine's key."""
        return self.by_url.get(url.rstrip("/"), self.common)

    def variables(self, urls: Iterable[str]) -> dict[str, str]:
        """What a process that talks to these engines is told."""
        keys = {url.rstrip("/"): key for url in urls if (key := self.of(url)) is not None}
        return {ENGINE_KEYS: json.dumps(keys)} if keys else {}

    def check(self, urls: Iterable[str]) -> None:
        """Raises ConfigError for a URL that holds a password or is named twice, and for an engine off loopback that has
        no key."""
        found = [url.rstrip("/") for url in urls]
        if twice := next((url for url in found if found.count(url) > 1), None):
            raise ConfigError(f"the engine {twice.rpartition('@')[2]} is named twice")
        for url in found:
            try:
                plain_address(url, f"; use {ENGINE_KEY}")
            except ValueError as error:
                raise ConfigError(f"the URL of an engine {error}") from error
            if not is_loopback(urlsplit(url).hostname or "") and self.of(url) is None:
                raise ConfigError(
                    f"the engine {url} is not on this machine's loopback: set {ENGINE_KEY} to the key that it was "
                    "started with"
                )
