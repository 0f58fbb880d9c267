"""Renders a run as plain Kubernetes manifests. Pure functions of the parts; they make no request to a cluster.

Every part is a Job, one index for each process, because a Job is what a task runner needs: a container that ends with
status 0 is done, any other is started again, and the process of a lost host gets a new pod on another one at once. (A
StatefulSet starts a container again after status 0, and keeps the pod of a lost host until somebody deletes it.) Gangs
need nothing more: their task runners start all processes together.

    ConfigMap           the run's configuration, without secrets
    Job `supervisor`    `agentrl train`, which alone gets the Secret; it writes the run's folder
    Job per part        `agentrl task`, restarted until it ends with status 0; starts when the supervisor says so
    Service `proxy`     the run's proxies, for programs in the cluster
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from agentrl.environment import ADMIN_KEY, DATABASE_URL, RUN_KEY, STORAGE
from agentrl.own_address import ADDRESS
from agentrl.placement.local_address import PORT
from agentrl.placement.part_spec import PROXY, PartSpec
from agentrl.placement.placed_elsewhere import PLACED_FILE
from agentrl.processes.restarts import USER_ERROR_STATUS

Manifest = dict[str, Any]

HTTP = "http"
"""Name of the port that answers `/health`."""
HTTP_PORT = 8080
"""A pod has a network of its own, so every process can use the same port."""
SUPERVISOR = "supervisor"
MOST_RESTARTS = 2**31 - 1
LOST_AFTER_S = 30
"""Seconds for which a host may be unreachable before its processes start elsewhere; Kubernetes' own default is 300."""
RUNNER_GRACE_S = 30
"""Seconds that a task runner has to release its lease, beyond the grace of its command."""
PLACED = ".placed"
"""File of the run's folder that says that task runners may start."""
LONGEST_NAME = 52
"""A Job's name; the name of its pods' hosts has the index behind it, and 63 characters at most."""
CONFIG_DIR = "/etc/agentrl"
CONFIG_FILE = "config.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What manifests take from the cluster. `claim` is a volume claim that all pods can write, mounted at `mount`."""

    image: str
    claim: str
    mount: str = "/data"
    namespace: str | None = None
    secret: str | None = None
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    claim_size: str | None = None
    storage_class: str | None = None
    user: int = 10001


def manifests(
    run: str, run_dir: PurePosixPath, config: str, parts: Sequence[PartSpec], target: Target
) -> list[Manifest]:
    """All manifests of a run. `run_dir` is the run's folder in the pods, `config` its configuration as YAML."""
    found = [
        _config_map(run, config),
        _supervisor(run, run_dir, target),
        *(_job(run, run_dir, spec, target) for spec in parts),
    ]
    if any(spec.name == PROXY and HTTP in spec.ports for spec in parts):
        found.append(_service(run))
    if target.claim_size is not None:
        found.insert(0, _claim(run, target, target.claim_size))
    if target.namespace is not None:
        for manifest in found:
            manifest["metadata"]["namespace"] = target.namespace
    return found


def secret_name(run: str, target: Target) -> str:
    """The name of the Secret that the supervisor reads."""
    return target.secret or resource_name(run, "secrets")


def resource_name(run: str, what: str) -> str:
    """The name of a resource: lower case, without characters that Kubernetes refuses, and different for each run."""
    wanted = f"agentrl-{run}-{what}"
    name = re.sub(r"[^a-z0-9-]+", "-", wanted.lower()).strip("-")
    if name == wanted and len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(wanted.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9].rstrip('-')}-{digest}"


def _metadata(run: str, part: str) -> Manifest:
    return {"name": resource_name(run, part), "labels": _labels(run, part)}


def _labels(run: str, part: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "agentrl",
        "app.kubernetes.io/instance": resource_name(run, "run"),
        "app.kubernetes.io/component": part,
    }


def _config_map(run: str, config: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(run, "config"),
        "data": {CONFIG_FILE: config},
    }


def _claim(run: str, target: Target, size: str) -> Manifest:
    spec: Manifest = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}}
    if target.storage_class is not None:
        spec["storageClassName"] = target.storage_class
    metadata = _metadata(run, "storage") | {"name": target.claim}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _service(run: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(run, PROXY),
        "spec": {
            "selector": _labels(run, PROXY),
            "ports": [{"name": HTTP, "port": HTTP_PORT, "targetPort": HTTP}],
        },
    }


def _job(run: str, run_dir: PurePosixPath, spec: PartSpec, target: Target) -> Manifest:
    """A part: an index for each process. Its restarts are counted by the task runners, not here."""
    command = ["task", "--folder", str(run_dir), "--part", spec.name]
    container = _container(spec.name, command, target)
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container["env"] += [
        {"name": "AGENTRL_RANK", "valueFrom": index},
        {"name": ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    container["resources"] = _resources(spec, target)
    if HTTP in spec.ports:
        container["env"].append({"name": PORT + HTTP.upper(), "value": str(HTTP_PORT)})
        container["ports"] = [{"name": HTTP, "containerPort": HTTP_PORT}]
        if not spec.gang:  # in a gang one process answers for all
            # No liveness probe: the run itself looks after its engines and proxies, and knows when one may be slow.
            container["readinessProbe"] = {"httpGet": {"path": "/health", "port": HTTP}, "periodSeconds": 5}
    pod = _pod(container, target)
    placed = run_dir / PLACED
    pod["initContainers"] = [_init("wait", f'until [ -e "{placed}" ]; do sleep 1; done', target)]
    pod["restartPolicy"] = "OnFailure"
    pod["terminationGracePeriodSeconds"] = math.ceil(spec.grace_s) + RUNNER_GRACE_S
    pod |= _spread(run, spec)
    job = {
        "completionMode": "Indexed",
        "completions": spec.ranks,
        "parallelism": spec.ranks,
        "backoffLimit": MOST_RESTARTS,
        "template": {"metadata": {"labels": _labels(run, spec.name)}, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(run, spec.name), "spec": job}


def _supervisor(run: str, run_dir: PurePosixPath, target: Target) -> Manifest:
    """The Job of `agentrl train`. A run that failed stays failed; a supervisor that was lost is started again."""
    container = _container(SUPERVISOR, ["train", f"{CONFIG_DIR}/{CONFIG_FILE}"], target)
    for name in (DATABASE_URL, ADMIN_KEY, RUN_KEY, *sorted(STORAGE)):
        key: Manifest = {"name": secret_name(run, target), "key": name, "optional": name != DATABASE_URL}
        container["env"].append({"name": name, "valueFrom": {"secretKeyRef": key}})
    placed = str(run_dir / PLACED)
    container["env"].append({"name": PLACED_FILE, "value": placed})
    container["volumeMounts"].append({"name": "config", "mountPath": CONFIG_DIR, "readOnly": True})
    pod = _pod(container, target)
    pod["initContainers"] = [_init("reset", f'rm -f "{placed}"', target)]
    pod["volumes"].append({"name": "config", "configMap": {"name": resource_name(run, "config")}})
    pod["restartPolicy"] = "Never"  # as the rules below need
    failed = {"containerName": SUPERVISOR, "operator": "In", "values": [USER_ERROR_STATUS]}
    job = {
        "backoffLimit": MOST_RESTARTS,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": failed}]},
        "template": {"metadata": {"labels": _labels(run, SUPERVISOR)}, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(run, SUPERVISOR), "spec": job}


def _init(name: str, script: str, target: Target) -> Manifest:
    """A container that runs a line of shell before the pod's own."""
    container = _container(name, [], target) | {"command": ["sh", "-c", script]}
    del container["args"]
    return container


def _container(name: str, arguments: list[str], target: Target) -> Manifest:
    return {
        "name": name,
        "image": target.image,
        "args": arguments,
        "workingDir": target.mount,
        "env": [{"name": "HOME", "value": "/scratch"}, {"name": "TMPDIR", "value": "/scratch"}],
        "volumeMounts": [
            {"name": "storage", "mountPath": target.mount},
            {"name": "scratch", "mountPath": "/scratch"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def _pod(container: Manifest, target: Target) -> Manifest:
    lost = [
        {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute"}
        | {"tolerationSeconds": LOST_AFTER_S}
        for state in ("not-ready", "unreachable")
    ]
    pod: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": target.user,
            "runAsGroup": target.user,
            "fsGroup": target.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": lost,
        "containers": [container],
        "volumes": [
            {"name": "storage", "persistentVolumeClaim": {"claimName": target.claim}},
            {"name": "scratch", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL and torch share tensors there
        ],
    }
    if target.node_selector:
        pod["nodeSelector"] = dict(target.node_selector)
    return pod


def _resources(spec: PartSpec, target: Target) -> Manifest:
    """CPUs are requested only; memory and GPUs are limits too."""
    need = spec.need
    limits: Manifest = {target.gpu_resource: need.gpus} if need.gpus else {}
    if need.memory_gb:
        limits["memory"] = f"{math.ceil(need.memory_gb * 1000)}M"
    return {"requests": {"cpu": f"{need.cpus:g}"} | limits} | ({"limits": limits} if limits else {})


def _spread(run: str, spec: PartSpec) -> Manifest:
    """Where the processes of a part may be, as Kubernetes says it."""
    own = {"labelSelector": {"matchLabels": _labels(run, spec.name)}}
    host = "kubernetes.io/hostname"
    if spec.ranks == 1:
        return {}
    if spec.spread == "one_per_host":
        apart = [own | {"topologyKey": host}]
        return {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart}}}
    if spec.spread == "spread":
        even = {"maxSkew": 1, "topologyKey": host, "whenUnsatisfiable": "ScheduleAnyway"}
        return {"topologySpreadConstraints": [even | own]}
    near = [{"weight": 1, "podAffinityTerm": own | {"topologyKey": host}}]
    return {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": near}}}
