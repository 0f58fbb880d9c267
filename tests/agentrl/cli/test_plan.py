"""`agentrl plan` prints who gets which GPUs, or one line that says what does not fit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.errors import UserError
from agentrl.trainer.planning.model_shapes import SHAPES


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text("name: r\nmodel: tiny\nresources: sglang:d2t2+fsdp:d4\n")
    return file


def plan(*arguments: str | Path) -> list[str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output.splitlines()


def test_the_plan_is_a_table_of_parts_hosts_and_gpus(config: Path) -> None:
    assert plan(config, "--gpus", "8") == [
        "part      processes  host    GPUs",
        "engine-0  2          host-0  4,5",
        "engine-1  2          host-0  6,7",
        "trainer   4          host-0  0-3",
    ]


def test_a_plan_without_gpus_starts_everything_on_the_cpu(config: Path) -> None:
    assert [line.split()[-1] for line in plan(config, "--gpus", "0")[1:]] == ["CPU"] * 3


def test_the_plan_says_how_parts_share_gpus(config: Path) -> None:
    lines = plan(config, "resources=sglang:d2t2|fsdp:d4", "--gpus", "4")
    assert lines[-2:] == [
        "trainer   4          host-0  0-3",
        "engines and trainer take turns on the same GPUs: engines release their memory during a step",
    ]
    shared = ["resources.colocated=true", "resources.divide_memory=true", "resources.engines.count=4"]
    lines = plan(config, "resources={}", *shared, "resources.trainer.ranks=4", "--gpus", "4")
    assert lines[-1] == "engines and trainer divide the memory of the same GPUs: engines have 0.4 of it"


def test_parts_that_do_not_fit_and_hosts_without_gpus_are_refused(config: Path) -> None:
    with pytest.raises(UserError, match=r"resources need 8 GPUs .*, but this host has 4"):
        plan(config, "--gpus", "4")
    with pytest.raises(UserError, match="--hosts needs --gpus"):
        plan(config, "--hosts", "2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "8xH101-80"), "did you mean 'H100-80'"),
        (("--gpus", "eight"), "such as 8xH100-80"),
        (("--gpus", "0xH100"), "such as 8xH100-80"),
        (("--gpus", "2xH100", "--model", "Qwen3-9B"), "did you mean 'Qwen3-8B'"),
        (("--gpus", "2xH100", "--model", "Qwen3-8B"), r"resources need 8 GPUs \(trainer 4, engines 4\), not 2"),
        (("--gpus", "8xH100", "--model", "Qwen3-8B", "--tokens", "100000"), "max_position_embeddings, 40960"),
        (("--gpus", "8xH100", "--tokens", "100", "--prompt", "99"), "at least 8 tokens are sampled"),
        (("--gpus", "8", "--json"), "need a kind of GPUs"),
    ],
)
def test_a_plan_of_memory_refuses_what_it_cannot_plan(arguments: tuple[str, ...], message: str, config: Path) -> None:
    with pytest.raises(UserError, match=message):
        plan(config, *arguments)


@pytest.mark.long
def test_a_plan_of_memory_says_what_a_run_takes(config: Path, tmp_path: Path) -> None:
    from forks import ran

    small = json.dumps(SHAPES["Qwen3-0.6B"] | {"num_hidden_layers": 2})
    (tmp_path / "config.json").write_text(small)
    arguments = ["plan", str(config), "resources=sglang:d4|fsdp:d8", "--gpus", "8xA100-40"]
    done = ran([*arguments, "--model", str(tmp_path / "config.json"), "--json"], os.environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["asked"]["ranks"] == 8
    assert found["asked"]["fits"]
    assert found["engines"]["episodes"] > 0
    assert found["checkpoint_bytes"] == pytest.approx(12 * found["trained"])
