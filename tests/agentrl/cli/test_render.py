"""`agentrl render` prints a run for a scheduler, without secrets, and refuses in one line what cannot run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.configs.config_files import parse_config
from agentrl.errors import ConfigError

CONFIG = """
name: r
model: /data/model
agent: m:Agent
tasks: tasks.jsonl
database_url: postgresql://user:a-secret@db/x
resources: {allocation: "sglang:d2t2+fsdp:d16", trainer: {hosts: 2}, rollout_workers: 3}
slurm: {partition: gpu, spare_nodes: 1}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    return file


def render(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["render", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def kubernetes(*arguments: str | Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(render("kubernetes", *arguments, "--image", "i", "--claim", "runs")))


def test_the_script_has_a_step_for_every_process(config: Path) -> None:
    script = render("slurm", config)
    steps = [line.split()[1] for line in script.splitlines() if line.startswith("keep ")]
    assert steps == [f"{part}-{rank}" for part, ranks in PROCESSES.items() for rank in range(ranks)]
    assert "#SBATCH --partition=gpu" in script.splitlines()
    assert "#SBATCH --nodes=4" in script.splitlines()  # two for the trainer, one for the engines, one spare
    assert "a-secret" not in script


PROCESSES = {"engine-0": 1, "engine-1": 1, "proxy": 1, "trainer": 2, "rollout": 3}


def test_the_manifests_have_a_job_for_every_part(config: Path) -> None:
    found = kubernetes(config)
    jobs = {one["metadata"]["labels"]["app.kubernetes.io/component"]: one for one in found if one["kind"] == "Job"}
    assert {part: job["spec"].get("completions") for part, job in jobs.items()} == PROCESSES | {"supervisor": None}
    assert "a-secret" not in str(found)


def test_the_supervisor_of_kubernetes_reads_the_same_run(config: Path) -> None:
    (text,) = [one["data"]["config.yaml"] for one in kubernetes(config) if one["kind"] == "ConfigMap"]
    run = parse_config(yaml.safe_load(text))
    assert (run.run_dir, run.placement, run.database_url) == (Path("/data/runs/r"), "kubernetes", None)
    assert run.resources.trainer.hosts == 2


def test_a_run_folder_outside_of_the_volume_claim_is_refused(config: Path) -> None:
    for elsewhere in ("/home/runs", "../runs"):
        with pytest.raises(ConfigError, match=r"^runs_dir: .* is not below /data, where the pods have the claim$"):
            kubernetes(config, f"runs_dir={elsewhere}")


def test_incomplete_options_are_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--storage-class needs --claim-size$"):
        kubernetes(config, "--storage-class", "fast")
    with pytest.raises(ConfigError, match=r"^--node-selector gpu: must be LABEL=VALUE$"):
        kubernetes(config, "--node-selector", "gpu")
