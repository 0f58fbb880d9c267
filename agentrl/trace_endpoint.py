"""The receiver of spans: its address from the configuration, its headers, which hold its key, from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

from agentrl.configs.metrics_config import TracesConfig
from agentrl.errors import ConfigError

PACKAGE = "opentelemetry-exporter-otlp-proto-common"


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEndpoint:
    """Where spans are sent."""

    url: str
    timeout_s: float
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


def require(config: TracesConfig | None) -> None:
    """Raise ConfigError if spans are to be sent and the package that encodes them is not installed."""
    if config is None:
        return
    try:
        metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise ConfigError(f"metrics.traces needs {PACKAGE}: pip install 'agentrl[otlp]'") from None


def endpoint_of(config: TracesConfig, env: Mapping[str, str]) -> TraceEndpoint:
    """The receiver of a configuration. Raises ConfigError for a missing package, and for headers that are missing or
    cannot be read.
    """
    require(config)
    headers = {} if config.headers_env is None else _headers(config.headers_env, env)
    return TraceEndpoint(url=config.endpoint, timeout_s=config.timeout_s, headers=headers)


def _headers(name: str, env: Mapping[str, str]) -> dict[str, str]:
    from opentelemetry.util.re import parse_env_headers

    given = env.get(name, "")
    parts = [part for part in given.split(",") if part.strip()]
    found = dict(parse_env_headers(given, liberal=True)) if all("=" in part for part in parts) else {}
    printable = all(value.isascii() and value.isprintable() for value in found.values())
    if not found or len(found) < len(parts) or not printable:
        raise ConfigError(
            f"config key 'metrics.traces.headers_env': the environment variable {name} holds no headers "
            "of the form NAME=VALUE,NAME=VALUE"
        )
    return found
