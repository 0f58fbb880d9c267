"""The processes of a run: command lines, environments, and ports that stay the same across restarts.

engine-0 …   one for each engine           scorer-0 …   one for each reward model of a component (`args.model`)
proxy        one                           rollout      one, or rollout-0 …
trainer      one
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.configs.episodes.teachers import is_folder, teachers_of
from agentrl.configs.run_config import RunConfig
from agentrl.engine import server_process
from agentrl.engine.backends import BACKENDS
from agentrl.engine.engine_keys import EngineKeys
from agentrl.environment import ADMIN_KEY, DATABASE_URL, PROXY_URL, RUN_KEY, SCORER_KEY, SCORERS, storage_variables
from agentrl.launch.engine_specs import engine_spec
from agentrl.launch.part_process import Part
from agentrl.models import resolve_model
from agentrl.placement import memory_share
from agentrl.placement.assignment import TRAINER, Assignment, assign, engine_name
from agentrl.placement.hosts import VISIBLE_GPUS, Host, this_host
from agentrl.storage.storage_users import storage_users

REWARD_MODEL = "reward_model"
"""The verifier whose argument `model` names a folder."""
DIVIDED_FRACTION = 0.4
"""Share of a GPU's memory for an engine that computes beside the trainer, where `engine.memory_fraction` gives none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All decisions made before the first process starts."""

    config: RunConfig
    model: Path
    database_url: str = field(repr=False)
    admin_key: str = field(repr=False)
    run_key: str = field(repr=False)
    proxy_port: int
    engine_ports: tuple[int, ...]
    engine_keys: EngineKeys = field(default_factory=EngineKeys, repr=False)
    scorer_ports: tuple[int, ...] = ()  # one for each of `scorer_models`
    assignment: Assignment = field(default_factory=Assignment)  # without it, each part sees all GPUs
    from_base: bool = False  # start over when no checkpoint is usable

    @property
    def proxy_url(self) -> str:
        """The proxy's URL from this machine."""
        host = self.config.proxy.host
        return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{self.proxy_port}"

    @property
    def engine_urls(self) -> list[str]:
        """The configured servers, else the URLs of the engines that the run starts."""
        return self.config.engine.urls or [engine_url(port) for port in self.engine_ports]

    @property
    def scorers(self) -> dict[str, str]:
        """Reward model, as the configuration names it → the URL of its scorer."""
        models = scorer_models(self.config)
        return {model: engine_url(port) for model, port in zip(models, self.scorer_ports, strict=True)}

    @property
    def takes_turns(self) -> bool:
        """Whether engines release their GPU memory while the trainer computes a step."""
        return takes_turns(self.config, self.assignment)

    @property
    def config_file(self) -> Path:
        """The run's copy of its configuration."""
        return self.config.run_dir / "config.yaml"


def engine_url(port: int) -> str:
    """The URL of an engine that the run starts."""
    return f"http://127.0.0.1:{port}"


def choose_ports(config: RunConfig, proxy: int = 0) -> tuple[int, tuple[int, ...]]:
    """Choose the proxy's port (the configured port, else `proxy`, else a free one) and one free port per engine.

    Raises UserError when the proxy's port is in use.
    """
    proxy = config.proxy.port or proxy
    if proxy:
        server_process.check_port(config.proxy.host, proxy)
    taken = {proxy}
    ports: list[int] = []
    while len(ports) < (0 if config.engine.urls else config.resources.engines.count) + (0 if proxy else 1):
        port = server_process.free_port()
        if port not in taken:
            taken.add(port)
            ports.append(port)
    return (proxy, tuple(ports)) if proxy else (ports[0], tuple(ports[1:]))


def scorer_models(config: RunConfig) -> list[str]:
    """The reward models for which the run starts a scorer."""
    components = [] if config.reward is None else config.reward.functions.values()
    named = [one.args.get("model") for one in components if one.function == REWARD_MODEL]
    return list(dict.fromkeys(str(model) for model in named if model is not None))


def choose_scorer_ports(config: RunConfig, taken: Collection[int]) -> tuple[int, ...]:
    """A free port for each of `scorer_models`."""
    ports: list[int] = []
    while len(ports) < len(scorer_models(config)):
        port = server_process.free_port()
        if port not in {*taken, *ports}:
            ports.append(port)
    return tuple(ports)


def assign_here(config: RunConfig) -> Assignment:
    """Give the run's parts the GPUs of this machine. Raises ConfigError when they do not fit."""
    host = this_host()
    return assign_to(config, (host,), bool(host.gpus))


def assign_to(config: RunConfig, hosts: Sequence[Host], gpus: bool) -> Assignment:
    """Give the run's parts hosts and their GPUs. `gpus` decides what the device `auto` is. Raises ConfigError."""
    on_gpu = {"auto": gpus, "cuda": True, "cpu": False}
    return assign(
        config.resources,
        hosts,
        engines_on_gpu=on_gpu[config.engine.device],
        trainer_on_gpu=on_gpu[config.trainer.device],
        engines=0 if config.engine.urls else None,
    )


def takes_turns(config: RunConfig, assignment: Assignment) -> bool:
    """Whether engines release their GPU memory while the trainer computes a step."""
    return config.resources.takes_turns or (assignment.colocated and not config.resources.divide_memory)


def sharing_lines(config: RunConfig, assignment: Assignment) -> list[str]:
    """How engines and trainer share GPUs, for the plan; nothing where they do not."""
    if takes_turns(config, assignment):
        return ["engines and trainer take turns on the same GPUs: engines release their memory during a step"]
    if assignment.colocated:
        share = config.engine.memory_fraction or DIVIDED_FRACTION
        return [f"engines and trainer divide the memory of the same GPUs: engines have {share:g} of it"]
    return []


def engine_share(plan: Plan) -> float | None:
    """The share of a GPU's memory for an engine; None: the server's choice.

    Raises ConfigError when what the trainer keeps between its steps leaves too little.
    """
    given = plan.config.engine.memory_fraction
    if given is not None or not plan.assignment.colocated:
        return given
    if not plan.takes_turns:
        return DIVIDED_FRACTION
    folders = filter(is_folder, teachers_of(plan.config.trainer.teacher))
    of_teachers = sum(memory_share.parameters(resolve_model(folder)) for folder in folders)
    kept = memory_share.kept_bytes(plan.config, memory_share.parameters(plan.model), of_teachers)
    return memory_share.beside_idle_trainer(kept, memory_share.gpu_bytes())


def engines(plan: Plan) -> list[Part]:
    """One part per engine of the run. It starts with base weights; the proxy loads the run's version."""
    parts, share = [], engine_share(plan)
    for index, port in enumerate(plan.engine_ports):
        spec = engine_spec(
            plan.config,
            plan.model,
            index,
            port=port,
            log_file=_log(plan, engine_name(index)),
            gpus=plan.assignment.gpus(engine_name(index)),
            memory_fraction=share,
            memory_saver=plan.takes_turns,
            key=plan.engine_keys.of(plan.engine_urls[index]),
        )
        parts.append(
            Part(
                name=engine_name(index),
                argv=BACKENDS[spec.backend].argv(spec),
                env=BACKENDS[spec.backend].environment(spec),
                log_file=spec.log_file,
            )
        )
    return parts


def proxy(plan: Plan) -> Part:
    """The proxy."""
    argv = ["proxy", "--run", plan.config.name, "--host", plan.config.proxy.host, "--port", str(plan.proxy_port)]
    argv += ["--workers", str(plan.config.proxy.workers)]
    for url in plan.engine_urls:
        argv += ["--engine", url]
    env = {DATABASE_URL: plan.database_url, ADMIN_KEY: plan.admin_key}
    return _part(plan, "proxy", argv, env | plan.engine_keys.variables(plan.engine_urls))


def scorers(plan: Plan) -> list[Part]:
    """One part for each reward model that the run serves itself, on the engines' kind of device. They listen on this
    machine only, without a key: one in the environment belongs to a scorer elsewhere.
    """
    device, env = plan.config.engine.device, {SCORER_KEY: ""}
    return [
        _part(plan, f"scorer-{index}", ["scorer", model, "--port", str(port), "--device", device], env)
        for index, (model, port) in enumerate(zip(scorer_models(plan.config), plan.scorer_ports, strict=True))
    ]


def rollouts(plan: Plan, finished: Callable[[], bool]) -> list[Part]:
    """The workers that run training and evaluation episodes. They run user code and use HTTP only."""
    count = plan.config.resources.rollout_workers
    names = ["rollout"] if count == 1 else [f"rollout-{index}" for index in range(count)]
    env = {PROXY_URL: plan.proxy_url, RUN_KEY: plan.run_key} | _storage(plan, "rollout")
    env |= {SCORERS: json.dumps(plan.scorers)} if plan.scorers else {}
    argv = ["rollout", "--config", str(plan.config_file), "--owner"]
    return [_part(plan, name, [*argv, name.replace("rollout", "local")], env, finished) for name in names]


def trainer(plan: Plan, finished: Callable[[], bool]) -> Part:
    """The trainer. It also exits with 0 when another process stops it; `finished` tells the two apart."""
    argv = ["trainer", "--config", str(plan.config_file), *(["--from-base"] if plan.from_base else [])]
    if plan.takes_turns and not plan.config.resources.takes_turns:
        argv.append("resources.colocated=true")  # the plan decided it
    env = {PROXY_URL: plan.proxy_url, DATABASE_URL: plan.database_url, ADMIN_KEY: plan.admin_key}
    env |= _storage(plan, TRAINER)
    if gpus := plan.assignment.gpus(TRAINER):
        env[VISIBLE_GPUS] = ",".join(gpus)
    return replace(_part(plan, "trainer", argv, env, finished), grace_s=plan.config.trainer.stop_timeout_s)


def _part(
    plan: Plan, name: str, argv: list[str], env: dict[str, str], done: Callable[[], bool] = lambda: False
) -> Part:
    """An agentrl process. `env` holds the variables for this process only, including its secrets."""
    return Part(name=name, argv=[sys.executable, "-m", "agentrl", *argv], env=env, log_file=_log(plan, name), done=done)


def _storage(plan: Plan, user: str) -> dict[str, str]:
    """This process's access to the object storage, for a part that uses it."""
    return storage_variables(os.environ) if user in storage_users(plan.config) else {}


def _log(plan: Plan, name: str) -> Path:
    return plan.config.run_dir / "logs" / f"{name}.log"
