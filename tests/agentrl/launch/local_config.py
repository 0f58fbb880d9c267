"""The configuration of a run on this host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.configs.config_files import parse_config
from agentrl.configs.run_config import RunConfig
from agentrl.launch.parts import Plan

BASE: dict[str, Any] = {
    "name": "r",
    "agent": "agentrl.agents.reverse:ReverseAgent",
    "tasks": "agentrl.agents.reverse:train_tasks",
}


def config(tmp_path: Path, model: object, **changes: Any) -> RunConfig:
    return parse_config(BASE | {"runs_dir": str(tmp_path / "runs"), "model": str(model)} | changes)


def a_plan(run: RunConfig, model: Path, **fields: Any) -> Plan:
    """A plan of a run whose proxy has port 1, and its one engine port 2."""
    own = {"database_url": "sqlite://", "admin_key": "a", "run_key": "r", "proxy_port": 1, "engine_ports": (2,)}
    return Plan(**{"config": run, "model": model} | own | fields)
