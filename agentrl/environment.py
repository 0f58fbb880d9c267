"""Environment variables, secrets above all: names, removal from child processes, masking for output."""

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
SCORERS = "AGENTRL_SCORERS"
"""JSON: reward model, as the configuration names it → address of the scorer that the run has started for it."""
SCORER_KEY = "AGENTRL_SCORER_KEY"
"""The key of an `agentrl scorer`. Rollout workers inherit it, since a reward names it as its `key_env`."""
SECRETS = frozenset({RUN_KEY, ADMIN_KEY, DATABASE_URL, ENGINE_KEY, ENGINE_KEYS})
"""Variables that hold a secret. A database URL holds its password."""
STORAGE_PREFIX = "AWS_"
"""How the variables of an object storage begin: keys, profile, region and address."""
STORAGE = frozenset(
    f"{STORAGE_PREFIX}{name}"
    for name in (
        "ACCESS_KEY_ID",
        "SECRET_ACCESS_KEY",
        "SESSION_TOKEN",
        "PROFILE",
        "CONFIG_FILE",
        "SHARED_CREDENTIALS_FILE",
        "DEFAULT_REGION",
        "REGION",
        "ENDPOINT_URL",
        "ENDPOINT_URL_S3",
        "CA_BUNDLE",
    )
)
"""Those that mean the same on every host. Others name the role of one host, or a service on it."""
_IDENTITY = frozenset({"AWS_ACCESS_KEY_ID", "AWS_PROFILE"})
# Greedy, up to the last `@`: hides the whole of a password that should have been percent-encoded.
_PASSWORD = re.compile(r"\A((?>[\w+]+://)?+[^:@/]*):.*@|(?<=[?&]password=)[^&]*", re.DOTALL)

_SECRET_NAME = re.compile(r"(?i)pass(word|wd|phrase)|secret|credential|token|api_?key|private_?key|authorization")
MASK = "***"


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without secrets and without access to the object storage, for a child process."""
    return {name: value for name, value in env.items() if name not in SECRETS and not name.startswith(STORAGE_PREFIX)}


def storage_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of the object storage in an environment."""
    return {name: value for name, value in env.items() if name.startswith(STORAGE_PREFIX)}


def with_storage(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    """The storage's variables of `first`; also those that only `second` has, unless `first` has a key or a profile:
    a key of the one with a token of the other would be refused.
    """
    ours = storage_variables(first)
    return ours if _IDENTITY & ours.keys() else storage_variables(second) | ours


def for_child(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a run's process: `env` without secrets, its output not buffered."""
    # Trainer and engine share the cores, so idle threads sleep instead of spinning.
    return {"OMP_WAIT_POLICY": "PASSIVE"} | without_secrets(env) | {"PYTHONUNBUFFERED": "1"}


def drop_secrets() -> None:
    """Remove the secrets from this process's environment, before it runs user code."""
    for name in SECRETS:
        os.environ.pop(name, None)


def drop_storage() -> None:
    """Remove the access to the object storage from this process's environment, before it runs user code."""
    for name in storage_variables(os.environ):
        del os.environ[name]


def without_password(url: str) -> str:
    """Return a database URL with its password masked. Accepts URLs that do not parse."""
    return _PASSWORD.sub(lambda found: "***" if found[1] is None else f"{found[1]}:***@", url)


def masked(value: Any, name: str = "") -> Any:
    """Mask the secrets of a configuration, for output.

    Masks strings whose name is that of a secret (`password`, `api_key`, `token`, …) and passwords in URLs. A field
    `…_env` holds a variable's name and stays.
    """
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
    """Whether the address is a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def key_from(env: Mapping[str, str], name: str) -> str | None:
    """The key in a variable; None when it is unset or empty. Raises ConfigError for characters that a header cannot
    carry.
    """
    key = env.get(name) or None
    if key is not None and not all("!" <= char <= "~" for char in key):
        raise ConfigError(f"{name}: a key consists of printable ASCII characters without spaces")
    return key
