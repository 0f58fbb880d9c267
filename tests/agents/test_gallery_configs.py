"""Every configuration of the gallery is valid; its agent and tasks can be loaded if they are of the gallery too."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from agentrl.configs.config_files import load_config
from agentrl.rollout.agent import load_agent
from agentrl.user_code import load_object

AGENTS = Path(__file__).parents[2] / "agents"
CONFIGS = sorted(str(path.relative_to(AGENTS)) for path in AGENTS.rglob("*.yaml"))


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coding programs that exist."""
    (tmp_path / "claude").write_text("#!/bin/sh\n")
    (tmp_path / "claude").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.parametrize("name", CONFIGS)
def test_its_agent_and_tasks_can_be_loaded(name: str) -> None:
    config = load_config(AGENTS / name, [])
    load_agent(config.agent, config.agent_args, scored=config.reward is not None)
    for source in (config.tasks, config.evaluation.tasks):
        if isinstance(source, str):  # others need a library
            assert len(list(islice(load_object(source, "tasks")(), 2))) == 2


def test_every_configuration_is_in_the_documentation() -> None:
    page = (AGENTS.parent / "docs" / "gallery.md").read_text()
    assert [name for name in CONFIGS if f"agents/{name}" not in page] == []
