"""A backend that a configuration may name has a client with all methods of `EngineClient`."""

from __future__ import annotations

import inspect
from typing import get_args

import aiohttp
import pytest

from agentrl.configs.engine_config import EngineConfig
from agentrl.engine.backends import BACKENDS
from agentrl.engine.engine_client import EngineClient


def test_every_backend_of_the_configuration_has_a_client() -> None:
    assert set(BACKENDS) == set(get_args(EngineConfig.model_fields["backend"].annotation))


def methods(kind: type) -> dict[str, list[str]]:
    """Public methods, and the names of their parameters."""
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name: list(inspect.signature(method).parameters) for name, method in found if not name.startswith("_")}


@pytest.mark.parametrize("name", BACKENDS)
async def test_a_client_has_the_methods_of_the_protocol(name: str) -> None:
    async with aiohttp.ClientSession() as http:
        client = BACKENDS[name].client("http://127.0.0.1:1", http)
        assert client.backend == name
        assert methods(EngineClient).items() <= methods(type(client)).items()
        client.close()
