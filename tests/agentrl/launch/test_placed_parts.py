"""The parts of a run that a scheduler places: their sizes, their secrets, and what each host is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.configs.config_files import parse_config
from agentrl.environment import ADMIN_KEY, DATABASE_URL, ENGINE_KEY, RUN_KEY, STORAGE
from agentrl.errors import ConfigError
from agentrl.launch.placed_parts import placed_parts
from agentrl.placement.part_spec import PartSpec

CONFIG = Path("/shared/runs/r/config.yaml")


def parts(**changes: Any) -> dict[str, PartSpec]:
    base = {"name": "r", "model": "tiny", "agent": "m:A", "tasks": "m:t", "placement": "ray"}
    run = parse_config(base | changes)
    return {part.name: part for part in placed_parts(run, CONFIG, engines_on_gpu=True, trainer_on_gpu=True)}


def test_an_allocation_string_sizes_engines_and_the_trainer():
    found = parts(resources={"allocation": "sglang:d2t4+fsdp:d8", "proxies": 3, "rollout_workers": 5})
    sizes = {name: (part.ranks, part.need.gpus, part.gang) for name, part in found.items()}
    assert sizes == {
        "engine-0": (1, 4, False),
        "engine-1": (1, 4, False),
        "proxy": (3, 0, False),
        "trainer": (1, 8, True),
        "rollout": (5, 0, False),
    }


def test_a_reward_model_that_the_run_should_serve_is_refused():
    reward = {"function": "reward_model", "args": {"model": "runs/style/model"}}
    with pytest.raises(ConfigError, match="start `agentrl scorer runs/style/model`, and give `url`"):
        parts(reward=reward)
    assert parts(reward={"function": "reward_model", "args": {"url": "http://scorer:1"}})


def test_a_part_larger_than_a_host_is_a_gang_of_hosts():
    sizes = {"engines": {"tensor": 16, "hosts": 2}, "trainer": {"ranks": 16, "hosts": 2}}
    found = parts(resources=sizes)
    for name in ("engine-0", "trainer"):
        part = found[name]
        assert (part.ranks, part.need.gpus, part.gang, part.spread) == (2, 8, True, "one_per_host")
        assert part.argv[-4:] == ("--host-rank", "{rank}", "--leader", "{leader}:{leader_port:gang}")


def test_each_part_gets_the_secrets_that_it_needs_and_no_others():
    assert {name: set(part.secrets) for name, part in parts().items()} == {
        "engine-0": {ADMIN_KEY, ENGINE_KEY},
        "proxy": {DATABASE_URL, ADMIN_KEY, ENGINE_KEY},
        "trainer": {DATABASE_URL, ADMIN_KEY},
        "rollout": {RUN_KEY},
    }


@pytest.mark.parametrize(
    ("changes", "users"),
    [
        ({"storage": {"url": "file:///shared/objects"}}, set()),
        ({"tasks": "s3://b/tasks.jsonl"}, set()),
        ({"storage": {"url": "s3://b/r"}}, {"trainer"}),
        ({"storage": {"url": "s3://b/r", "weights": True}}, {"trainer", "engine-0"}),
        ({"evaluation": {"tasks": "s3://b/held-out.jsonl"}}, {"rollout"}),
        ({"evaluation": {"unseen_tasks": "s3://b/unseen.jsonl"}}, {"rollout"}),
    ],
)
def test_only_parts_that_use_a_bucket_get_the_access_to_it(changes, users):
    assert {name for name, part in parts(**changes).items() if STORAGE & set(part.secrets)} == users


def test_only_the_trainer_is_fenced_and_only_workers_end_by_themselves():
    found = parts()
    assert [name for name, part in found.items() if part.fenced] == ["trainer"]
    assert [name for name, part in found.items() if part.ends] == ["trainer", "rollout"]


def test_configured_engines_are_not_placed():
    found = parts(engine={"urls": ["http://10.0.0.1:30000"]})
    assert "engine-0" not in found
    assert found["proxy"].argv[-2:] == ("--engine", "http://10.0.0.1:30000")


@pytest.mark.parametrize(
    "resources",
    [
        {"proxies": 2},
        {"trainer": {"ranks": 2, "hosts": 2}},
        {"engines": {"tensor": 2, "hosts": 2}},
    ],
)
def test_local_placement_refuses_parts_of_several_hosts(resources):
    with pytest.raises(ConfigError, match=r"resources\.\S+: 2 needs a placement other than local"):
        parts(placement="local", resources=resources)


@pytest.mark.parametrize("placement", ["ray", "slurm", "kubernetes"])
@pytest.mark.parametrize("resources", [{"colocated": True}, "sglang:d1|fsdp:d1"])
def test_a_scheduler_refuses_engines_and_a_trainer_on_the_same_gpus(placement, resources):
    with pytest.raises(ConfigError) as error:
        parts(placement=placement, resources=resources)
    assert str(error.value).endswith(
        f"resources.colocated: true is not possible with placement {placement}, which gives each part GPUs of its own: "
        "write false, or + instead of | in resources.allocation"
    )
    assert "engine-0" in parts(placement=placement, resources={"colocated": False})
