"""The environment variables that are secrets: what each process gets of them, it is given by name."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Any

from agentrl.errors import ConfigError

PROXY_URL = "AGENTRL_PROXY_URL"
RUN_KEY = "AGENTRL_RUN_KEY"
ADMIN_KEY = "AGENTRL_ADMIN_KEY"
DATABASE_URL = "AGENTRL_DATABASE_URL"
ENGINE_KEY = "AGENTRL_ENGINE_KEY"
ENGINE_KEYS = "AGENTRL_ENGINE_KEYS"
SECRETS = frozenset({RUN_KEY, ADMIN_KEY, DATABASE_URL, ENGINE_KEY, ENGINE_KEYS})
"""A database's URL holds its password."""
# Greedy, up to the last `@`: a password that should have been percent-encoded is hidden as a whole.
_PASSWORD = re.compile(r"\A((?>[\w+]+://)?+[^:@/]*):.*@|(?<=[?&]password=)[^&]*", re.DOTALL)

_SECRET_NAME = re.compile(r"(?i)pass(word|wd|phrase)|secret|credential|token|api_?key|private_?key|authorization")
MASK = "***"


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """`env` as a child process may inherit it."""
    return {name: value for name, value in env.items() if name not in SECRETS}


def drop_secrets() -> None:
    """Take the secrets out of this process's own environment: for code that we run but did not write."""
    for name in SECRETS:
        os.environ.pop(name, None)


def without_password(url: str) -> str:
    """A database's URL as it may be printed, whether or not it can be parsed."""
    return _PASSWORD.sub(lambda found: "***" if found[1] is None else f"{found[1]}:***@", url)


def masked(value: Any, name: str = "") -> Any:
    """A configuration as it may be shown: strings under the name of a secret (`password`, `api_key`, `token`, …)
    and passwords in URLs become `***`. `…_env` names a variable, which is no secret."""
    if isinstance(value, dict):
        return {key: masked(inner, f"{name}.{key}" if name else str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [masked(inner, name) for inner in value]
    if not isinstance(value, str) or not value:
        return value
    if _SECRET_NAME.search(name) and not name.endswith("_env"):
        return MASK
    return without_password(value) if "://" in value else value


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def key_from(env: Mapping[str, str], name: str) -> str | None:
    """The key that a variable holds; None when it is unset or empty. Raises ConfigError for what no header carries."""
    key = env.get(name) or None
    if key is not None and not all("!" <= char <= "~" for char in key):
        raise ConfigError(f"{name}: a key consists of printable ASCII characters without spaces")
    return key
