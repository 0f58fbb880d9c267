"""A run whose trainer is started by the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from forks import Command
from proxy_stub import ADMIN_KEY, PublishStub, make_run

from agentrl.models import resolve_model
from agentrl.store import Database


class Run:
    """A run of the tiny model with one group in each step; its groups are the caller's to play."""

    def __init__(self, folder: Path, *, steps: int = 2, **trainer: Any) -> None:
        self.database = Database(f"sqlite:///{folder}/store.db")
        self.database.upgrade()
        self.run_id = make_run(self.database, steps=steps)
        self.proxy = PublishStub(self.database, self.run_id)
        self.folder = folder / "test"
        self.config = folder / "run.yaml"
        model = {"model": str(resolve_model("tiny")), "agent": "a:B", "tasks": "t", "name": "test", "steps": steps}
        trainer = {"groups_per_step": 1, "lr": 1e-3, "threads": 1} | trainer
        self.config.write_text(yaml.safe_dump(model | {"runs_dir": str(folder), "trainer": trainer}))

    def start(self, *overrides: str) -> Command:
        """The command."""
        env = os.environ | {
            "AGENTRL_DATABASE_URL": self.database.url,
            "AGENTRL_PROXY_URL": self.proxy.url,
            "AGENTRL_ADMIN_KEY": ADMIN_KEY,
        }
        return Command(["trainer", "--config", str(self.config), *overrides], env)
