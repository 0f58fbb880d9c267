"""A supervisor that is placed itself lets runners start by a file, and chooses no scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.configs.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.placement.placed_elsewhere import PLACED_FILE, PlacedElsewhere
from agentrl.placement.schedulers import scheduler_of


def test_runners_may_start_between_apply_and_remove(tmp_path: Path) -> None:
    file = tmp_path / "new" / "placed"
    placement = PlacedElsewhere(file)
    placement.check([])
    assert not file.exists()
    placement.apply([])
    placement.apply([])
    assert file.exists()
    placement.remove()
    placement.remove(kill=True)
    assert not file.exists()


def test_a_supervisor_in_a_job_starts_nothing_itself(tmp_path: Path) -> None:
    env = {PLACED_FILE: str(tmp_path / "placed")}
    for name, moves in (("slurm", False), ("kubernetes", True)):
        placement = scheduler_of(RunConfig.model_validate({"name": "r", "model": "tiny", "placement": name}), env)
        assert isinstance(placement, PlacedElsewhere)
        assert placement.moves_supervisor is moves


def test_kubernetes_starts_nothing_from_outside() -> None:
    with pytest.raises(ConfigError, match="apply the manifests of `agentrl render kubernetes`"):
        scheduler_of(RunConfig(name="r", model="tiny", placement="kubernetes"), {})
