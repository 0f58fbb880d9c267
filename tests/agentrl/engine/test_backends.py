"""A backend that a configuration may name has a client, which speaks the API of its own server."""

import inspect
from typing import get_args

from agentrl.configs.engine_config import EngineConfig
from agentrl.engine.backends import BACKENDS
from agentrl.engine.sglang_client import EngineClient

OF_ANY_SERVER = {"hang_up", "close", "health"}
"""The methods that a client may inherit from SGLang's: they use connections and other methods alone."""


def test_every_backend_of_the_configuration_has_a_client() -> None:
    assert set(BACKENDS) == set(get_args(EngineConfig.model_fields["backend"].annotation))


def inherited(kind: type[EngineClient]) -> set[str]:
    """The public methods that a client takes from SGLang's and that send SGLang's requests."""
    public = {name for name, _ in inspect.getmembers(EngineClient, inspect.isfunction) if not name.startswith("_")}
    return {name for name in public - OF_ANY_SERVER if getattr(kind, name) is getattr(EngineClient, name)}


def test_a_client_of_another_backend_sends_no_requests_of_sglang() -> None:
    assert {
        name: inherited(kind) for name, kind in BACKENDS.items() if kind is not EngineClient and inherited(kind)
    } == {}


def test_a_method_that_a_client_forgot_is_found() -> None:
    class Forgetful(EngineClient):
        async def flush_cache(self) -> None:
            pass

    assert {"generate", "load_adapter", "model_info"} <= inherited(Forgetful)
    assert "flush_cache" not in inherited(Forgetful)
