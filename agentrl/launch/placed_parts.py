"""The parts of a run that a scheduler places: what `parts` is for one machine.

engine-0 …   an engine each; over several hosts, a gang of one process a host
proxy        `resources.proxies` processes; engines join them, commands reach them through their runner's relay
trainer      one process a host, a gang; fenced, so that never two trainers write
rollout      `resources.rollout_workers` processes
"""

from __future__ import annotations

from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.environment import ADMIN_KEY, DATABASE_URL, ENGINE_KEY, PROXY_URL, RUN_KEY, STORAGE
from agentrl.errors import ConfigError
from agentrl.launch.parts import scorer_models
from agentrl.placement.assignment import TRAINER, engine_name
from agentrl.placement.part_spec import PROXY, Need, PartSpec
from agentrl.storage.storage_users import storage_users

AGENTRL = ("{python}", "-m", "agentrl")
ROLLOUT = "rollout"
CPUS = {"engine": 1.0, PROXY: 1.0, "rank": 1.0, ROLLOUT: 1.0}
"""Cores that each process asks the scheduler for."""


def placed_parts(
    run: RunConfig, config_file: Path, *, engines_on_gpu: bool, trainer_on_gpu: bool, from_base: bool = False
) -> list[PartSpec]:
    """The parts of a run whose configuration every host reads at `config_file`. Raises ConfigError for a reward model
    that the run should serve itself, which is possible on one machine only.
    """
    for model in scorer_models(run):
        raise ConfigError(
            f"reward: args.model {model}: a placed run starts no scorer; start `agentrl scorer {model}`, and give `url`"
        )
    engines = [] if run.engine.urls else [*range(run.resources.engines.count)]
    return [
        *(_engine(run, config_file, index, engines_on_gpu) for index in engines),
        _proxy(run),
        _trainer(run, config_file, trainer_on_gpu, from_base),
        _rollout(run, config_file),
    ]


def _engine(run: RunConfig, config_file: Path, index: int, on_gpu: bool) -> PartSpec:
    size = run.resources.engines
    name = engine_name(index)
    argv = [*AGENTRL, "engine", "--config", str(config_file), "--index", str(index), "--join", "{proxy}"]
    argv += [
        "--host",
        "{address}",
        "--port",
        "{port:http}",
        "--log-file",
        str(config_file.parent / "logs" / f"{name}.log"),
    ]
    if size.hosts > 1:
        argv += ["--host-rank", "{rank}", "--leader", "{leader}:{leader_port:gang}"]
    return PartSpec(
        name=name,
        argv=tuple(argv),
        secrets=(ADMIN_KEY, ENGINE_KEY, *_storage(run, "engine")),
        ranks=size.hosts,
        gang=size.hosts > 1,
        spread="one_per_host" if size.hosts > 1 else "pack",
        need=Need(gpus=size.gpus // size.hosts if on_gpu else 0, cpus=CPUS["engine"]),
        ports=("http", "gang") if size.hosts > 1 else ("http",),
        max_restarts=run.max_restarts,
    )


def _proxy(run: RunConfig) -> PartSpec:
    argv = [*AGENTRL, "proxy", "--run", run.name, "--host", "{address}", "--port", "{port:http}"]
    argv += ["--workers", str(run.proxy.workers)]
    for url in run.engine.urls:
        argv += ["--engine", url]
    return PartSpec(
        name=PROXY,
        argv=tuple(argv),
        secrets=(DATABASE_URL, ADMIN_KEY, ENGINE_KEY),
        ranks=run.resources.proxies,
        spread="spread",
        need=Need(cpus=CPUS[PROXY] * run.proxy.workers),
        ports=("http",),
        max_restarts=run.max_restarts,
        grace_s=15.0,
    )


def _trainer(run: RunConfig, config_file: Path, on_gpu: bool, from_base: bool) -> PartSpec:
    size = run.resources.trainer
    share = size.ranks // size.hosts
    argv = [*AGENTRL, "trainer", "--config", str(config_file), *(["--from-base"] if from_base else [])]
    if size.hosts > 1:
        argv += ["--host-rank", "{rank}", "--leader", "{leader}:{leader_port:gang}"]
    return PartSpec(
        name=TRAINER,
        argv=tuple(argv),
        env={PROXY_URL: "{proxy}"},
        secrets=(DATABASE_URL, ADMIN_KEY, *_storage(run, TRAINER)),
        ranks=size.hosts,
        gang=True,
        spread="one_per_host",
        need=Need(gpus=share if on_gpu else 0, cpus=CPUS["rank"] * share),
        ports=("gang",),
        fenced=True,
        ends=True,
        max_restarts=run.max_restarts,
        grace_s=min(run.trainer.stop_timeout_s, 3600.0),
    )


def _rollout(run: RunConfig, config_file: Path) -> PartSpec:
    return PartSpec(
        name=ROLLOUT,
        argv=(*AGENTRL, "rollout", "--config", str(config_file), "--owner", "rollout-{rank}"),
        env={PROXY_URL: "{proxy}"},
        secrets=(RUN_KEY, *_storage(run, ROLLOUT)),
        ranks=run.resources.rollout_workers,
        spread="spread",
        need=Need(cpus=CPUS[ROLLOUT]),
        ends=True,
        max_restarts=run.max_restarts,
    )


def _storage(run: RunConfig, user: str) -> list[str]:
    """The names of the storage's variables, for a part that uses it."""
    return sorted(STORAGE) if user in storage_users(run) else []
