"""The configuration of a run on this host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.configs.config_files import parse_config
from agentrl.configs.run_config import RunConfig

BASE: dict[str, Any] = {
    "name": "r",
    "agent": "agentrl.agents.reverse:ReverseAgent",
    "tasks": "agentrl.agents.reverse:train_tasks",
}


def config(tmp_path: Path, model: object, **changes: Any) -> RunConfig:
    return parse_config(BASE | {"runs_dir": str(tmp_path / "runs"), "model": str(model)} | changes)
