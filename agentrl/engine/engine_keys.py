"""The keys of engines. A key allows a client to sample from an engine, pause it and load weights into it.

Keys are passed in environment variables only, never in URLs or on command lines:

    AGENTRL_ENGINE_KEY     the key that a started engine requires, and the default key for all engines
    AGENTRL_ENGINE_KEYS    keys of single engines: {"http://gpu-3:30000": "…"}

An address may name the engine's backend (`vllm+http://gpu-3:30000`); the key is that of its URL.

A key is sent as a bearer token (SGLang's `--api-key`). A key with a colon is `user:password` for a reverse proxy.

An engine that joins a run without a key in its environment requires a key of its own: `derived_key`, the HMAC of its
URL under the admin key. Every replica has the admin key, and computes the key when it needs it. So no key
is sent in the join request, none is stored, and a restarted replica knows all. From a derived key neither the admin key
nor the key of another engine follows.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

from agentrl.configs.engine_config import engine_address, engine_url
from agentrl.environment import ENGINE_KEY, ENGINE_KEYS, is_loopback, key_from
from agentrl.errors import ConfigError


def new_key() -> str:
    """Generate a random engine key."""
    return f"arl-engine-{secrets.token_urlsafe(24)}"


def derived_key(admin_key: str, url: str) -> str:
    """The key of an engine that joined with a key of its own, from the admin key of the proxies and its URL."""
    message = f"agentrl engine {url.rstrip('/')}".encode()
    digest = hmac.digest(admin_key.encode(), message, "sha256")
    return f"arl-engine-{urlsafe_b64encode(digest).decode().rstrip('=')}"


def key_digest(key: str) -> str:
    """A digest by which a proxy recognizes that an engine derived its key as the proxy does."""
    return hashlib.sha256(key.encode()).hexdigest()


def authorization(key: str | None) -> dict[str, str]:
    """The Authorization header for a key."""
    if key is None:
        return {}
    if ":" in key:
        return {"Authorization": f"Basic {b64encode(key.encode()).decode()}"}
    return {"Authorization": f"Bearer {key}"}


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """The keys of a run's engines."""

    common: str | None = field(default=None, repr=False)
    by_url: Mapping[str, str] = field(default_factory=dict, repr=False)
    admin_key: str = field(default="", repr=False)  # of the proxies; keys of joined engines are derived from it

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Read the keys from environment variables. Raises ConfigError for invalid keys."""
        raw = env.get(ENGINE_KEYS) or "{}"
        try:
            by_url = json.loads(raw)
        except json.JSONDecodeError:
            by_url = None
        if not isinstance(by_url, dict) or not all(isinstance(key, str) for key in by_url.values()):
            raise ConfigError(f'{ENGINE_KEYS}: must be a JSON object, {{"http://HOST:PORT": "KEY"}}')
        for key in by_url.values():
            key_from({ENGINE_KEYS: key}, ENGINE_KEYS)
        return cls(key_from(env, ENGINE_KEY), {engine_url(address): key for address, key in by_url.items()})

    def of(self, address: str) -> str | None:
        """The key of an engine."""
        return self.by_url.get(engine_url(address), self.common)

    def own(self, url: str) -> str:
        """The key of an engine that joined with a key of its own."""
        return derived_key(self.admin_key, url)

    def derives(self, url: str, digest: str) -> bool:
        """Whether an engine whose key has this digest derived it as `own` does."""
        return hmac.compare_digest(key_digest(self.own(url)).encode(), digest.encode())

    def variables(self, addresses: Iterable[str]) -> dict[str, str]:
        """The environment variables for a process that calls these engines."""
        keys = {engine_url(address): key for address in addresses if (key := self.of(address)) is not None}
        return {ENGINE_KEYS: json.dumps(keys)} if keys else {}

    def check(self, addresses: Iterable[str], *, has_own: bool = False) -> None:
        """Raise ConfigError for an address with a password, an unknown backend, an engine that is given twice, or one
        off loopback without a key.

        Engines that have a key of their own (`has_own`) need none here.
        """
        given = list(addresses)
        found = [engine_url(address) for address in given]
        if twice := next((url for url in found if found.count(url) > 1), None):
            raise ConfigError(f"the engine {twice.rpartition('@')[2]} is given twice")
        for address, url in zip(given, found, strict=True):
            try:
                engine_address(address, f"; use {ENGINE_KEY}")
            except ValueError as error:
                raise ConfigError(f"the URL of an engine {error}") from error
            if not has_own and not is_loopback(urlsplit(url).hostname or "") and self.of(url) is None:
                raise ConfigError(
                    f"the engine {url} is not on this machine's loopback: set {ENGINE_KEY} to the key that it was "
                    "started with"
                )
