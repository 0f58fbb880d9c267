"""URLs in answers: from the configuration, or from a Host header that is trusted."""

import socket
from typing import Any

import pytest
from starlette.requests import Request

from agentrl.configs.proxy_config import ProxyConfig
from agentrl.errors import RequestError
from agentrl.proxy.access.public_address import PublicAddress


def asked(host: str) -> Request:
    return Request(
        {
            "type": "http",
            "scheme": "http",
            "path": "/",
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", host.encode("latin-1"))],
            "server": ("10.0.0.1", 80),
        }
    )


def base(host: str, **config: Any) -> str:
    return PublicAddress.of(ProxyConfig(**config)).base(asked(host))


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8080", "10.1.2.3", "[::1]:8080", "localhost:80", "LOCALHOST", socket.gethostname(), "Proxy:1"]
)
def test_a_host_that_is_trusted_is_used(host: str) -> None:
    assert base(host, allowed_hosts=["proxy"]).lower() == f"http://{host}".lower()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "x" * 5000])
def test_a_host_that_is_not_trusted_is_refused_with_the_key_to_set(host: str) -> None:
    with pytest.raises(RequestError, match=r"proxy\.public_url") as refused:
        base(host)
    assert refused.value.status == 400
    assert len(str(refused.value)) < 300


def test_a_configured_address_is_used_whatever_the_host_header_says() -> None:
    assert base("evil.example", public_url="https://agents.example.org/x/") == "https://agents.example.org/x"


def test_a_configured_address_is_an_http_address_without_a_password() -> None:
    for url in ("agents.example.org", "ftp://a", "http://u:p@a", "http://a?q=1"):
        with pytest.raises(ValueError, match="public_url"):
            ProxyConfig(public_url=url)


def test_a_session_is_not_opened_for_an_unknown_host(proxy: Any) -> None:
    headers = {"Authorization": "Bearer run-key", "Host": "evil.example"}
    answer = proxy.post("/sessions", {}, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "host_not_allowed"
    assert proxy.get("/api/status")["sessions"]["open"] == 0
