"""The engine backends by their name in a configuration (`engine.backend`): a client, and how to start a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from agentrl.engine.checks.supported_releases import Support
from agentrl.engine.engine_client import EngineClient
from agentrl.engine.engine_spec import EngineSpec
from agentrl.engine.sglang import sglang_command
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.engine.sglang.sglang_support import SGLANG
from agentrl.engine.vllm import vllm_command
from agentrl.engine.vllm.vllm_client import VLLMClient
from agentrl.engine.vllm.vllm_support import VLLM


class Connect(Protocol):
    """Makes a client of one server. `http` belongs to the caller."""

    def __call__(self, url: str, http: aiohttp.ClientSession, *, key: str | None = None) -> EngineClient:
        """A client of the server at `url`, to which it sends `key`."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A kind of server. tests/agentrl/engine/contract/ tests it."""

    client: Connect
    argv: Callable[[EngineSpec], list[str]]
    """The command line. Raises UserError for a specification that the server cannot do."""
    environment: Callable[[EngineSpec], dict[str, str]]
    support: Support


BACKENDS: dict[str, Backend] = {
    "sglang": Backend(SGLangClient, sglang_command.argv, sglang_command.environment, SGLANG),
    "vllm": Backend(VLLMClient, vllm_command.argv, vllm_command.environment, VLLM),
}
