"""Runs with held-out tasks, each with a database, an engine and a proxy of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from databases import Databases

from agentrl.configs.run_config import RunConfig
from agentrl.rollout import held_out
from agentrl.testing import FakeEngine

from .evaluated_run import AGENT, Run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "player.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("player", None)


@pytest.fixture
def start(databases: Databases, tiny_model: Path, folder: Path, serve: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(held_out, "LOOK_S", 0.01)

    @contextmanager
    def start(config: RunConfig, kind: str = "sqlite") -> Iterator[Run]:
        with databases.lent(kind) as url, FakeEngine() as engine:
            run = Run(url, config, tiny_model, engine, folder)
            with serve(url, [engine.url], int(run.url.rpartition(":")[2])):
                yield run
            run.database.close()

    return start
