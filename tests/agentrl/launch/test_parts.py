"""The command lines, secrets and GPUs of a run's parts."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentrl.configs.run_config import RunConfig
from agentrl.engine.engine_keys import EngineKeys
from agentrl.environment import (
    ADMIN_KEY,
    DATABASE_URL,
    ENGINE_KEY,
    ENGINE_KEYS,
    RUN_KEY,
    SCORER_KEY,
    SCORERS,
    SECRETS,
    STORAGE,
    storage_variables,
)
from agentrl.launch import part_process, parts
from agentrl.launch.part_process import Part
from agentrl.launch.parts import Plan
from agentrl.placement import memory_share
from agentrl.placement.hosts import Host

from .local_config import a_plan, config


def test_ports_are_distinct_and_none_is_opened_for_engines_that_already_run(tmp_path: Path, model: Path) -> None:
    proxy, engines = parts.choose_ports(config(tmp_path, model, resources={"engines": {"count": 3}}))
    assert len({proxy, *engines}) == 4
    assert parts.choose_ports(config(tmp_path, model, engine={"urls": ["http://e"]}))[1] == ()


@pytest.mark.parametrize(
    ("lora", "room"), [({}, []), ({"rank": 8}, []), ({"rank": 8, "publish": "adapter", "targets": ["o_proj"]}, ["8"])]
)
def test_engines_have_room_for_the_adapters_that_they_will_be_sent(
    tmp_path: Path, model: Path, lora: dict[str, Any], room: list[str]
) -> None:
    plan = a_plan(config(tmp_path, model, trainer={"lora": lora}), model)
    (engine,) = parts.engines(plan)
    assert [rank for option, rank in pairwise(engine.argv) if option == "--max-lora-rank"] == room


def test_each_reward_model_of_a_component_has_one_scorer_that_the_workers_know(tmp_path: Path, model: Path) -> None:
    served = {"function": "reward_model", "args": {"model": "runs/style/model"}}
    components = {
        "style": served,
        "step": served | {"per": "call"},
        "other": {"function": "reward_model", "args": {"model": "runs/b"}},
        "far": {"function": "reward_model", "args": {"url": "http://scorer:1"}},
        "judged": {"function": "judge", "args": {"model": "judge"}},
    }
    run = config(tmp_path, model, reward={"components": components}, resources={"rollout_workers": 2})
    ports = parts.choose_scorer_ports(run, {1, 2})
    assert len({1, 2, *ports}) == 4
    plan = a_plan(run, model, scorer_ports=ports)
    first, second = parts.scorers(plan)
    assert (first.name, second.name) == ("scorer-0", "scorer-1")
    assert first.argv[-6:] == ["scorer", "runs/style/model", "--port", str(ports[0]), "--device", "auto"]
    assert first.log_file == run.run_dir / "logs" / "scorer-0.log"
    assert first.env == {SCORER_KEY: ""}  # a key in the command's environment is that of a scorer elsewhere
    known = {"runs/style/model": f"http://127.0.0.1:{ports[0]}", "runs/b": f"http://127.0.0.1:{ports[1]}"}
    assert [json.loads(part.env[SCORERS]) for part in parts.rollouts(plan, lambda: True)] == [known, known]
    assert part_process.for_child({SCORERS: "{}"})[SCORERS] == "{}"


def test_a_run_without_reward_models_has_no_scorer(tmp_path: Path, model: Path) -> None:
    run = config(tmp_path, model)
    assert parts.choose_scorer_ports(run, ()) == ()
    assert parts.scorer_models(run) == []


def test_the_runs_seed_seeds_each_engine_with_another(tmp_path: Path, model: Path) -> None:
    def seeds(seed: int) -> list[int]:
        plan = a_plan(config(tmp_path, model, seed=seed), model, engine_ports=(2, 3))
        return [int(engine.argv[engine.argv.index("--random-seed") + 1]) for engine in parts.engines(plan)]

    assert seeds(5) == seeds(5)
    assert len({*seeds(-1), *seeds(0), *seeds(5)}) == 6
    assert all(0 <= seed < 2**31 for seed in seeds(-1))


def test_only_a_run_that_is_told_to_may_start_over_without_its_checkpoints(tmp_path: Path, model: Path) -> None:
    def trainer(**flags: bool) -> list[str]:
        plan = a_plan(config(tmp_path, model), model, **flags)
        return parts.trainer(plan, lambda: True).argv

    assert trainer(from_base=True) == [*trainer(), "--from-base"]


def test_each_rollout_worker_has_a_name_and_an_owner_of_its_own(tmp_path: Path, model: Path) -> None:
    settings = {"model": model, "database_url": "x", "admin_key": "x", "run_key": "x", "proxy_port": 1}
    run = config(tmp_path, model, resources={"rollout_workers": 2})
    workers = parts.rollouts(Plan(config=run, engine_ports=(), **settings), lambda: True)
    assert [(part.name, part.argv[-1]) for part in workers] == [("rollout-0", "local-0"), ("rollout-1", "local-1")]


@pytest.mark.parametrize("storage", [{}, {"url": "s3://b/r"}, {"url": "s3://b/r", "weights": True}])
def test_each_part_is_told_only_the_secrets_that_it_needs(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, storage: dict[str, Any]
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "ours")
    for name in storage_variables(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "storage")
    plan = Plan(
        config=config(tmp_path, model, engine={"device": "cpu"}, storage=storage),
        model=model,
        database_url="sqlite:///told",
        admin_key="told",
        run_key="told",
        proxy_port=1,
        engine_ports=(2,),
        engine_keys=EngineKeys(by_url={parts.engine_url(2): "arl-engine-x"}),
    )

    def told(part: Part) -> set[str]:
        env = part_process.for_child(os.environ) | part.env
        assert "ours" not in env.values()
        return env.keys() & (SECRETS | STORAGE)

    bucket = {"AWS_ACCESS_KEY_ID"}
    assert told(parts.proxy(plan)) == {ADMIN_KEY, DATABASE_URL, ENGINE_KEYS}
    assert told(parts.trainer(plan, lambda: True)) == {ADMIN_KEY, DATABASE_URL} | (bucket if storage else set())
    (worker,) = parts.rollouts(plan, lambda: True)
    assert told(worker) == {RUN_KEY}
    assert told(parts.engines(plan)[0]) == {ENGINE_KEY} | (bucket if storage.get("weights") else set())
    assert not any("arl-engine-x" in word for part in (parts.proxy(plan), *parts.engines(plan)) for word in part.argv)


def test_each_process_sees_its_gpus_and_gets_its_sizes(tmp_path: Path, model: Path) -> None:
    run = config(tmp_path, model, resources="sglang:d2t2+fsdp:d4", engine={"device": "cuda", "quantization": "fp8"})
    assignment = parts.assign_to(run, (Host("h", tuple("abcdefgh")),), gpus=True)
    plan = a_plan(run, model, engine_ports=(2, 3), assignment=assignment)
    first, second = parts.engines(plan)
    assert [part.env["CUDA_VISIBLE_DEVICES"] for part in (first, second)] == ["e,f", "g,h"]
    assert parts.trainer(plan, bool).env["CUDA_VISIBLE_DEVICES"] == "a,b,c,d"
    assert {("--tp-size", "2"), ("--quantization", "fp8")} <= set(pairwise(first.argv))
    assert not {"--max-total-tokens", "--mem-fraction-static", "--pp-size"} & set(first.argv)


def shared_plan(run: RunConfig, model: Path) -> Plan:
    """Engine and trainer on one GPU."""
    return a_plan(run, model, assignment=parts.assign_to(run, (Host("h", ("0",)),), gpus=True))


def test_parts_on_one_gpu_take_turns(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer keeps little memory while idle, and gets the settings that only the plan decided."""
    monkeypatch.setattr(memory_share, "gpu_bytes", lambda: 80 * 2**30)
    monkeypatch.setattr(memory_share, "parameters", lambda _: 10**9)
    plan = shared_plan(config(tmp_path, model, engine={"device": "cuda"}), model)
    engine = parts.engines(plan)[0].argv
    assert "--enable-memory-saver" in engine
    assert ("--mem-fraction-static", "0.68") in set(pairwise(engine))
    assert parts.trainer(plan, bool).argv[-1] == "resources.colocated=true"
    plan = shared_plan(config(tmp_path, model, engine={"device": "cuda", "memory_fraction": 0.7}), model)
    assert ("--mem-fraction-static", "0.7") in set(pairwise(parts.engines(plan)[0].argv))
    assert "take turns" in parts.sharing_lines(plan.config, plan.assignment)[0]


def test_parts_on_one_gpu_may_divide_its_memory(tmp_path: Path, model: Path) -> None:
    plan = shared_plan(config(tmp_path, model, engine={"device": "cuda"}, resources={"divide_memory": True}), model)
    engine = parts.engines(plan)[0].argv
    assert "--enable-memory-saver" not in engine
    assert ("--mem-fraction-static", str(parts.DIVIDED_FRACTION)) in set(pairwise(engine))
    assert "resources.colocated=true" not in parts.trainer(plan, bool).argv
    assert parts.sharing_lines(plan.config, plan.assignment) == [
        "engines and trainer divide the memory of the same GPUs: engines have 0.4 of it"
    ]
