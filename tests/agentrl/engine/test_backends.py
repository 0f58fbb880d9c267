"""A backend that a configuration may name has a client."""

from typing import get_args

from agentrl.configs.engine_config import EngineConfig
from agentrl.engine.backends import BACKENDS


def test_every_backend_of_the_configuration_has_a_client() -> None:
    assert set(BACKENDS) == set(get_args(EngineConfig.model_fields["backend"].annotation))
