"""The configured upstreams: which models calls may name besides the policy, where they are served, and their keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentrl.configs.proxy_config import UpstreamConfig
from agentrl.errors import ConfigError

HIDDEN = b"[key]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Upstream:
    """A model that another server serves."""

    name: str  # as calls name it
    base_url: str
    model: str  # as its server names it
    timeout_s: float
    key: str | None = field(repr=False)

    def without_key(self, text: bytes) -> bytes:
        """The text with the key replaced, in case the upstream repeats it."""
        return text if self.key is None else text.replace(self.key.encode(), HIDDEN)


class _Named(msgspec.Struct):
    model: Any = None


def from_config(configured: Mapping[str, UpstreamConfig]) -> dict[str, Upstream]:
    """The upstreams of a run, with their keys from the environment. Raises ConfigError for a missing key."""
    found: dict[str, Upstream] = {}
    for name, config in configured.items():
        key = None
        if config.api_key_env is not None:
            key = os.environ.get(config.api_key_env, "").strip()
            if not (key.isascii() and key.isprintable() and key):
                raise ConfigError(
                    f"config key 'proxy.upstreams.{name}.api_key_env': the environment variable "
                    f"{config.api_key_env} holds no key"
                )
        found[name] = Upstream(
            name=name, base_url=config.base_url, model=config.model or name, timeout_s=config.timeout_s, key=key
        )
    return found


def requested_upstream(configured: Mapping[str, Upstream], body: bytes) -> Upstream | None:
    """The upstream that a request names; None if it names the policy, or if the body cannot be read."""
    try:
        model = msgspec.json.decode(body, type=_Named).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return configured.get(model) if isinstance(model, str) else None
