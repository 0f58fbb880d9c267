"""The receiver of spans: what its configuration and its headers may be, and that its key is shown nowhere."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from agentrl import trace_endpoint
from agentrl.configs.config_files import parse_config
from agentrl.configs.metrics_config import TracesConfig
from agentrl.errors import ConfigError
from agentrl.trace_endpoint import endpoint_of

RUN = {"name": "n", "model": "tiny"}


def config(**traces: Any) -> TracesConfig:
    found = parse_config(RUN | {"metrics": {"traces": traces}}).metrics.traces
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://eu.example.org/otel/v1/traces", "https://eu.example.org/otel/v1/traces"),
    ],
)
def test_an_address_without_a_path_gets_that_of_otlp(given: str, url: str) -> None:
    assert config(endpoint=given).endpoint == url


@pytest.mark.parametrize(
    "endpoint",
    [
        "collector:4318",
        "grpc://collector:4317",
        "http://",
        "http://user:secret@collector",
        "http://c/v1/traces?key=x",
        "",
    ],
)
def test_an_unusable_endpoint_is_refused_by_its_name(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.traces\.endpoint"):
        config(endpoint=endpoint)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout_s", 0),
        ("max_content_bytes", 1),
        ("max_content_bytes", 2**30),
        ("headers_env", ""),
        ("service_name", ""),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"metrics\.traces\.{field}"):
        config(endpoint="http://c", **{field: value})


def test_samples_need_a_tracker() -> None:
    with pytest.raises(ConfigError, match=r"metrics.*samples: needs `wandb` or `trackio`"):
        parse_config(RUN | {"metrics": {"samples": {}}})


def test_headers_come_from_the_environment_and_are_not_shown() -> None:
    settings = config(endpoint="http://c", headers_env="KEYS")
    found = endpoint_of(settings, {"KEYS": "Authorization=Basic dTpw, x-team = a%2Cb "})
    assert found.headers == {"authorization": "Basic dTpw", "x-team": "a,b"}
    assert "dTpw" not in repr(found) + repr(settings)
    assert endpoint_of(config(endpoint="http://c"), {}).headers == {}


@pytest.mark.parametrize("value", [None, "", " ", "token", "a=b,c", "a=ü", "a=b\nc: d", "=x", "a=x%0d%0ab:c"])
def test_headers_that_cannot_be_read_are_refused_without_showing_them(value: str | None) -> None:
    env = {} if value is None else {"KEYS": value}
    with pytest.raises(ConfigError, match=r"'metrics\.traces\.headers_env': the environment variable KEYS") as caught:
        endpoint_of(config(endpoint="http://c", headers_env="KEYS"), env)
    assert value is None or not value.strip() or value not in str(caught.value)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(trace_endpoint.metadata, "version", missing)
    trace_endpoint.require(None)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl\[otlp\]'"):
        trace_endpoint.require(config(endpoint="http://c"))
