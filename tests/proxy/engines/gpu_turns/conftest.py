"""A trainer that has started, and an engine that serves the rest of a known sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentrl.domain.schemas import Json
from agentrl.proxy.engines import pool as pools
from agentrl.store.training import trainer_epochs
from agentrl.testing import FakeEngine

from .turn_calls import LENGTH, LETTER, NEWLINE, states


def rest(input_ids: list[int]) -> list[int]:
    """The rest of SENTENCE after prompt and answer so far: any slip at a seam shows in the text."""
    done = next(n for n, token in enumerate(reversed(input_ids)) if token == NEWLINE)
    return [LETTER + n for n in range(done, LENGTH)] + [2]


@pytest.fixture(autouse=True)
def alphabet(fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine.respond = lambda ids, _: rest(ids)
    monkeypatch.setattr(pools, "WATCH_EVERY_S", 0.1)


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def weights(tiny_model: Path, tmp_path: Path) -> Path:
    """A version's folder, with all tensors."""
    folder = tmp_path / "v1-step"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tiny_model / "model.safetensors")
    return folder


@pytest.fixture
def epoch(proxy: Any, until: Callable[..., Any]) -> int:
    """A trainer has started, and the engine serves."""
    until(lambda: states(proxy) == ["serving"])
    return int(proxy.database.transact(trainer_epochs.begin_epoch, proxy.run_id))


@pytest.fixture
def run_config(request: pytest.FixtureRequest, run_config: Json) -> Json:
    return run_config | {"publish": getattr(request, "param", {})}
