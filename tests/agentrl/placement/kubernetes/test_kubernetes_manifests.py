"""The manifests of a run: valid for Kubernetes, without secrets, and with what each part needs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from agentrl.environment import DATABASE_URL, SECRETS, STORAGE
from agentrl.placement.kubernetes.kubernetes_manifests import Manifest, Target, manifests, resource_name
from agentrl.placement.part_spec import Need, PartSpec
from agentrl.placement.placed_elsewhere import PLACED_FILE

VALIDATOR = Path(__file__).parents[4] / ".venv-lint" / "bin" / "kubernetes-validate"
VERSION = "1.37"
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
PARTS = (
    PartSpec(
        name="trainer",
        argv=("x",),
        ranks=2,
        gang=True,
        spread="one_per_host",
        need=Need(gpus=8, cpus=16, memory_gb=64),
        ports=("rendezvous",),
        grace_s=20,
    ),
    PartSpec(name="engine-0", argv=("x",), need=Need(gpus=2), ports=("http",)),
    PartSpec(name="engine-1", argv=("x",), ranks=2, gang=True, need=Need(gpus=8), ports=("http", "init")),
    PartSpec(name="proxy", argv=("x",), ranks=2, spread="spread", ports=("http",)),
    PartSpec(name="rollout", argv=("x",), ranks=3, need=Need(cpus=0.5)),
)
TARGET = Target(image="registry/agentrl:1", claim="runs")


def rendered(run: str = "r", target: Target = TARGET) -> dict[str, Manifest]:
    """The manifests by component."""
    found = manifests(run, PurePosixPath(f"/data/runs/{run}"), f"name: {run}\n", PARTS, target)
    return {f"{one['kind']} {one['metadata']['labels']['app.kubernetes.io/component']}": one for one in found}


def pod(part: str, **of: Any) -> dict[str, Any]:
    found: dict[str, Any] = rendered(**of)[f"Job {part}"]["spec"]["template"]["spec"]
    return found


def container(part: str) -> dict[str, Any]:
    found: dict[str, Any] = pod(part)["containers"][0]
    return found


def variables(part: str) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container(part)["env"]}


def validated(text: str, file: Path) -> subprocess.CompletedProcess[str]:
    if not VALIDATOR.exists():
        pytest.skip("kubernetes-validate is not installed: run `make setup-lint`")
    file.write_text(text)
    command = [VALIDATOR, "--strict", "--kubernetes-version", VERSION, file]
    return subprocess.run(command, capture_output=True, text=True)


def test_all_manifests_are_valid_for_kubernetes(tmp_path: Path) -> None:
    target = Target(
        image="i",
        claim="runs",
        namespace="team",
        node_selector={"gpu": "h100"},
        claim_size="100Gi",
        storage_class="shared",
    )
    found = manifests("r", PurePosixPath("/data/runs/r"), "name: r\n", PARTS, target)
    done = validated(yaml.safe_dump_all(found), tmp_path / "run.yaml")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(f"against version {VERSION}") == len(found) == 9


def test_the_validator_refuses_a_wrong_key(tmp_path: Path) -> None:
    wrong = rendered()["Job proxy"]
    wrong["spec"]["completionsMode"] = "Indexed"
    done = validated(yaml.safe_dump(wrong), tmp_path / "run.yaml")
    assert done.returncode != 0
    assert "completionsMode" in done.stdout


def test_every_part_is_a_job_with_an_index_for_each_process() -> None:
    for spec in PARTS:
        job = rendered()[f"Job {spec.name}"]["spec"]
        assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", spec.ranks, spec.ranks)
        assert pod(spec.name)["restartPolicy"] == "OnFailure"
        assert container(spec.name)["args"] == ["task", "--folder", "/data/runs/r", "--part", spec.name]
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        assert variables(spec.name)["AGENTRL_RANK"] == {"fieldRef": {"fieldPath": index}}
        assert variables(spec.name)["AGENTRL_ADDRESS"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_a_part_gets_its_gpus_memory_and_time_to_end() -> None:
    assert container("trainer")["resources"] == {
        "requests": {"cpu": "16", "nvidia.com/gpu": 8, "memory": "64000M"},
        "limits": {"nvidia.com/gpu": 8, "memory": "64000M"},
    }
    assert container("rollout")["resources"] == {"requests": {"cpu": "0.5"}}
    assert pod("trainer")["terminationGracePeriodSeconds"] == 50


def test_processes_are_spread_as_the_part_says() -> None:
    (apart,) = pod("trainer")["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"] == rendered()["Job trainer"]["spec"]["template"]["metadata"]["labels"]
    (even,) = pod("proxy")["topologySpreadConstraints"]
    assert even["whenUnsatisfiable"] == "ScheduleAnyway"
    assert "affinity" not in pod("engine-0")


def test_proxies_and_engines_are_ready_when_they_are_healthy() -> None:
    for part in ("proxy", "engine-0"):
        assert container(part)["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
        assert container(part)["ports"] == [{"name": "http", "containerPort": 8080}]
        assert variables(part)["AGENTRL_PORT_HTTP"] == "8080"
    for part in ("trainer", "engine-1", "rollout"):
        assert "readinessProbe" not in container(part)
    service = rendered()["Service proxy"]["spec"]
    assert service["selector"] == rendered()["Job proxy"]["spec"]["template"]["metadata"]["labels"]


def test_only_the_supervisor_gets_the_secret_by_name() -> None:
    assert variables("supervisor")[DATABASE_URL]["secretKeyRef"] == {
        "name": "agentrl-r-secrets",
        "key": DATABASE_URL,
        "optional": False,
    }
    for spec in PARTS:
        assert not (SECRETS | STORAGE) & variables(spec.name).keys()
    for name in STORAGE:
        assert variables("supervisor")[name]["secretKeyRef"]["optional"]


def test_task_runners_wait_until_the_supervisor_lets_them_start() -> None:
    (reset,) = pod("supervisor")["initContainers"]
    assert reset["command"] == ["sh", "-c", 'rm -f "/data/runs/r/.placed"']
    assert variables("supervisor")[PLACED_FILE] == "/data/runs/r/.placed"
    for spec in PARTS:
        (wait,) = pod(spec.name)["initContainers"]
        assert wait["command"] == ["sh", "-c", 'until [ -e "/data/runs/r/.placed" ]; do sleep 1; done']


def test_a_failed_run_is_not_started_again_by_itself() -> None:
    job = rendered()["Job supervisor"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "supervisor", "operator": "In", "values": [2]},
    }
    assert pod("supervisor")["restartPolicy"] == "Never"


def test_pods_have_no_more_rights_than_they_need() -> None:
    for part in ("supervisor", *(spec.name for spec in PARTS)):
        assert pod(part)["automountServiceAccountToken"] is False
        assert pod(part)["securityContext"]["runAsNonRoot"] is True
        assert container(part)["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("run", ["r", "My.Run_2", "x" * 100, "-", "Ä"])
def test_every_name_is_one_that_kubernetes_takes(run: str) -> None:
    for manifest in rendered(run).values():
        assert DNS_LABEL.fullmatch(f"{manifest['metadata']['name']}-9999")


def test_runs_and_parts_have_different_names() -> None:
    wanted = [("a-b", "c"), ("A-b", "c"), ("a.b", "c"), ("x" * 100, "c"), ("x" * 101, "c")]
    assert len({resource_name(run, part) for run, part in wanted}) == len(wanted)
