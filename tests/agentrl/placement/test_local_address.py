"""The address of the interface that leads to the database's host."""

from __future__ import annotations

import pytest

from agentrl.errors import UserError
from agentrl.own_address import ADDRESS, local_address
from agentrl.placement.local_address import interface_of, local_port
from agentrl.store.db.sql_engines import host_of


def test_loopback_is_reached_from_loopback():
    assert local_address("127.0.0.1") == local_address("localhost") == "127.0.0.1"


def test_a_variable_chooses_the_address(monkeypatch):
    monkeypatch.setenv(ADDRESS, "10.9.8.7")
    assert local_address("127.0.0.1") == "10.9.8.7"


def test_a_variable_fixes_the_port_of_its_name(monkeypatch):
    monkeypatch.setenv("AGENTRL_PORT_HTTP", "8080")
    assert local_port("http") == 8080
    assert local_port("gang") > 0


@pytest.mark.parametrize("wrong", ["0", "65536", "http", "-1"])
def test_a_fixed_port_that_is_none_is_refused(monkeypatch, wrong):
    monkeypatch.setenv("AGENTRL_PORT_HTTP", wrong)
    with pytest.raises(UserError, match=f"^AGENTRL_PORT_HTTP: '{wrong}' is not a port from 1 to 65535$"):
        local_port("http")


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("postgresql://u:p@db.example:5432/x", "db.example"),
        ("postgresql:///x?host=/run/postgresql", "127.0.0.1"),
        ("postgresql:///x?host=db", "db"),
        ("sqlite:////tmp/a.db", "127.0.0.1"),
    ],
)
def test_the_host_of_a_database_is_read_from_its_url(url, host):
    assert host_of(url) == host


def test_an_address_names_its_interface():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
