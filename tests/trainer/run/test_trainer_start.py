"""What a trainer records at its start, and what a later one keeps of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loop_setup import Setup
from support import save_tiny_model

from agentrl.configs.run_config import RunConfig
from agentrl.store import activity, events
from agentrl.trainer import training_run
from agentrl.trainer.distributed import World
from agentrl.trainer.run import trainer_start
from agentrl.trainer.run.device_defaults import RankDevice
from agentrl.trainer.run.trainer_start import engine_dtype
from agentrl.trainer_facts import line

ON_A_CPU = {
    "device": "CPU",
    "ranks": 1,
    "dtype": "float32",
    "tokens_per_microbatch": 4096,
    "checkpoint_every": 1,
    "engine_dtype": "float32",
}


@pytest.fixture
def n_steps() -> int:
    return 1


def starts(setup: Setup) -> list[dict[str, Any]]:
    found = setup.database.query(events.of_run, setup.run_id, events.TRAINER_STARTED)
    return [{name: value for name, value in event.data.items() if name not in ("start", "end")} for event in found]


def test_a_start_is_recorded_printed_and_shown(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    assert setup.train()
    assert starts(setup) == [ON_A_CPU]
    said = "1 × CPU, computes in float32, 4,096 tokens a microbatch, a checkpoint every step, engines in float32"
    assert f"trainer: {said}" in capsys.readouterr().out.splitlines()
    with setup.database.read() as conn:
        assert line(activity.of_run(conn, setup.run_id, 60.0)["trainer"]) == said


def test_a_run_keeps_the_type_that_it_began_with(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    with setup.database.write() as conn:
        events.record(conn, setup.run_id, events.TRAINER_STARTED, {"dtype": "bfloat16"}, "trainer")
    dtypes = []
    made = training_run.make_models

    def recording(*args: Any) -> Any:
        dtypes.append(args[1].dtype)
        return made(*args)

    monkeypatch.setattr(training_run, "make_models", recording)
    assert setup.train()
    assert dtypes == ["bfloat16"]
    assert starts(setup)[-1] == ON_A_CPU | {"dtype": "bfloat16"}


def test_checkpoints_follow_their_cost_on_every_device(tmp_path: Path, world: World) -> None:
    trainer = trainer_start.resolved(RunConfig(name="r", model="m").trainer, save_tiny_model(tmp_path / "model"), world)
    assert (trainer.dtype, trainer.checkpoint_every) == ("float32", "auto")


def test_on_a_gpu_types_and_sizes_follow_it(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = RankDevice(kind="cuda", memory_bytes=80 * 2**30)
    monkeypatch.setattr(trainer_start, "rank_device", lambda world, share: gpu)
    config = RunConfig(name="r", model="m")
    model = save_tiny_model(tmp_path / "model")
    trainer = trainer_start.resolved(config.trainer, model, world)
    assert (trainer.dtype, trainer.tokens_per_microbatch, trainer.checkpoint_every) == ("bfloat16", 131_072, "auto")
    given = config.trainer.model_copy(update={"dtype": "float32", "tokens_per_microbatch": 7, "checkpoint_every": 3})
    assert trainer_start.resolved(given, model, world) == given
    facts = trainer_start.facts_of(trainer, SimpleNamespace(device=torch.device("cpu"), size=8))
    assert line(facts).endswith("8 × CPU, computes in bfloat16, 131,072 tokens a microbatch, checkpoints by their cost")


@pytest.mark.parametrize(
    ("engine", "trainer", "expected"),
    [
        ({}, "cpu", torch.float32),
        ({}, "cuda", torch.bfloat16),
        ({"device": "cpu"}, "cuda", torch.float32),
        ({"device": "cuda"}, "cpu", torch.bfloat16),
        ({"dtype": "float16"}, "cuda", torch.float16),
    ],
)
def test_weights_are_published_in_the_engines_type(engine: dict[str, str], trainer: str, expected: torch.dtype) -> None:
    config = RunConfig(name="r", model="m", engine=engine)
    assert engine_dtype(config, torch.device(trainer)) == expected
