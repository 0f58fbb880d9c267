"""The URL under which clients reach this proxy. Answers that open sessions and groups contain it."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from starlette.requests import Request

from agentrl.configs.proxy_config import ProxyConfig
from agentrl.errors import RequestError


@dataclass(frozen=True, slots=True)
class PublicAddress:
    """`url` is the proxy's URL; without it, the URL comes from the request's Host header, if that is trusted.

    Trusted hosts are IP addresses, `localhost`, this machine's name and `hosts`. Any other name could lead an agent,
    with its session's key, to another server.
    """

    url: str | None
    hosts: frozenset[str]

    @classmethod
    def of(cls, config: ProxyConfig) -> PublicAddress:
        """The address of a proxy's configuration."""
        own = {"localhost", socket.gethostname()}
        return cls(config.public_url, frozenset(host.lower() for host in own.union(config.allowed_hosts)))

    def base(self, request: Request) -> str:
        """`http://HOST:PORT`, without a slash at its end. Raises RequestError 400 for a host that is not trusted."""
        if self.url is not None:
            return self.url
        host = (request.base_url.hostname or "").lower()
        if host not in self.hosts and not _is_ip_address(host):
            raise RequestError(
                400,
                f"the Host header names {host[:100]!r}, which this proxy does not know: set proxy.public_url, or add "
                "the name to proxy.allowed_hosts",
                code="host_not_allowed",
            )
        return str(request.base_url).rstrip("/")


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
