"""The engine backends by their name in a configuration (`engine.backend`).

A backend is a client with the methods of `EngineClient`; tests/agentrl/engine/contract/ tests it.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.engine.sglang_client import EngineClient

BACKENDS: Mapping[str, type[EngineClient]] = {"sglang": EngineClient}
