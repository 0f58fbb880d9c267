"""The processes of a run: command lines, environments, and ports that stay the same across restarts."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.engine import server_process
from agentrl.engine.engine_keys import EngineKeys
from agentrl.environment import ADMIN_KEY, DATABASE_URL, PROXY_URL, RUN_KEY
from agentrl.launch.part_process import Part


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
    while len(ports) < (0 if config.engine.urls else config.engine.count) + (0 if proxy else 1):
        port = server_process.free_port()
        if port not in taken:
            taken.add(port)
            ports.append(port)
    return (proxy, tuple(ports)) if proxy else (ports[0], tuple(ports[1:]))


def engine_seed(seed: int, index: int) -> int:
    """The seed of one engine. Engines get different seeds so that they produce different samples."""
    return zlib.crc32(f"{seed} engine {index}".encode()) & 0x7FFF_FFFF


def engines(plan: Plan) -> list[Part]:
    """One part per SGLang server of the run. It starts with base weights; the proxy loads the run's version."""
    config, lora = plan.config.engine, plan.config.trainer.lora
    parts = []
    for index, port in enumerate(plan.engine_ports):
        spec = server_process.EngineSpec(
            model=plan.model,
            port=port,
            log_file=_log(plan, f"engine-{index}"),
            device=server_process.pick_device(config.device),
            dtype=config.dtype,
            max_total_tokens=config.max_total_tokens,
            max_running_requests=config.max_running_requests,
            seed=engine_seed(plan.config.seed, index),
            deterministic=config.deterministic,
            lora_rank=lora.rank if lora.publish == "adapter" else 0,
            lora_targets=tuple(lora.targets),
            extra_args=tuple(config.extra_args),
            key=plan.engine_keys.of(plan.engine_urls[index]),
        )
        parts.append(
            Part(
                name=f"engine-{index}",
                argv=server_process.argv(spec),
                env=server_process.environment(spec),
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


def rollout(plan: Plan, finished: Callable[[], bool]) -> Part:
    """The worker that runs training and evaluation episodes. It runs user code and uses HTTP only."""
    argv = ["rollout", "--config", str(plan.config_file), "--owner", "local"]
    return _part(plan, "rollout", argv, {PROXY_URL: plan.proxy_url, RUN_KEY: plan.run_key}, finished)


def trainer(plan: Plan, finished: Callable[[], bool]) -> Part:
    """The trainer. It also exits with 0 when another process stops it; `finished` tells the two apart."""
    argv = ["trainer", "--config", str(plan.config_file), *(["--from-base"] if plan.from_base else [])]
    env = {PROXY_URL: plan.proxy_url, DATABASE_URL: plan.database_url, ADMIN_KEY: plan.admin_key}
    return replace(_part(plan, "trainer", argv, env, finished), grace_s=plan.config.trainer.stop_timeout_s)


def _part(
    plan: Plan, name: str, argv: list[str], env: dict[str, str], done: Callable[[], bool] = lambda: False
) -> Part:
    """An agentrl process. `env` holds the variables for this process only, including its secrets."""
    env = env | {
        "PYTHONUNBUFFERED": "1",
        # Trainer and engine share the cores, so idle threads sleep instead of spinning.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }
    return Part(name=name, argv=[sys.executable, "-m", "agentrl", *argv], env=env, log_file=_log(plan, name), done=done)


def _log(plan: Plan, name: str) -> Path:
    return plan.config.run_dir / "logs" / f"{name}.log"
