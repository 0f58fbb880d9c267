"""agentrl trains any LLM agent with reinforcement learning.

    from agentrl import Client, RunConfig, load_config

Public names are imported from their modules on first use (PEP 562), which keeps `import agentrl` fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agentrl.version import __version__

if TYPE_CHECKING:
    from agentrl.client import AsyncClient, AsyncSession, Client, Session
    from agentrl.configs.config_files import load_config
    from agentrl.configs.run_config import RunConfig
    from agentrl.errors import AgentRLError, ConfigError, RequestError, UserError
    from agentrl.rollout.agent import Agent
    from agentrl.rollout.score import Result, Reward
    from agentrl.rollout.tools.function_tool import tool
    from agentrl.rollout.tools.tool_loop import ToolLoop
    from agentrl.rollout.tools.tool_result import ToolBroken, ToolContext, ToolError, ToolResult
    from agentrl.rollout.workflows.rollout_workflow import RolloutWorkflow
    from agentrl.training import training

__all__ = [
    "Agent",
    "AgentRLError",
    "AsyncClient",
    "AsyncSession",
    "Client",
    "ConfigError",
    "RequestError",
    "Result",
    "Reward",
    "RolloutWorkflow",
    "RunConfig",
    "Session",
    "ToolBroken",
    "ToolContext",
    "ToolError",
    "ToolLoop",
    "ToolResult",
    "UserError",
    "__version__",
    "load_config",
    "tool",
    "training",
]

_MODULES = {
    "Agent": "agentrl.rollout.agent",
    "AgentRLError": "agentrl.errors",
    "AsyncClient": "agentrl.client",
    "AsyncSession": "agentrl.client",
    "Client": "agentrl.client",
    "ConfigError": "agentrl.errors",
    "RequestError": "agentrl.errors",
    "Result": "agentrl.rollout.score",
    "Reward": "agentrl.rollout.score",
    "RolloutWorkflow": "agentrl.rollout.workflows.rollout_workflow",
    "RunConfig": "agentrl.configs.run_config",
    "Session": "agentrl.client",
    "ToolBroken": "agentrl.rollout.tools.tool_result",
    "ToolContext": "agentrl.rollout.tools.tool_result",
    "ToolError": "agentrl.rollout.tools.tool_result",
    "ToolLoop": "agentrl.rollout.tools.tool_loop",
    "ToolResult": "agentrl.rollout.tools.tool_result",
    "UserError": "agentrl.errors",
    "load_config": "agentrl.configs.config_files",
    "tool": "agentrl.rollout.tools.function_tool",
    "training": "agentrl.training",
}
"""Where each public name is defined."""


def __getattr__(name: str) -> Any:
    """Import a public name. Raises AttributeError with the nearest valid name."""
    if name not in _MODULES:
        from agentrl.errors import did_you_mean

        hint = "" if name.startswith("_") else did_you_mean(name, _MODULES)
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}{hint}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
