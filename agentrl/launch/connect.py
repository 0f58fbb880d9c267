"""How programs reach an active run: its keys, the proxy's port, and the file `env` for a shell to source."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Power
from agentrl.engine.engine_keys import EngineKeys
from agentrl.engine.engine_keys import new_key as new_engine_key
from agentrl.environment import ADMIN_KEY, PROXY_URL, RUN_KEY, key_from
from agentrl.errors import ConfigError, UserError
from agentrl.launch import parts
from agentrl.launch.parts import Plan
from agentrl.location import ENV_FILE
from agentrl.store.key_records import new_key

PORT_FILE = ".proxy-port"


def choose_keys(env: Mapping[str, str]) -> tuple[str, str]:
    """The admin key and the run key: from the environment, else new ones. Raises ConfigError for an invalid key."""
    admin_key, run_key = key_from(env, ADMIN_KEY), key_from(env, RUN_KEY)
    if admin_key is not None and admin_key == run_key:
        raise ConfigError(f"{ADMIN_KEY} and {RUN_KEY} must differ: they grant different rights")
    return admin_key or new_key(Power.ADMIN), run_key or new_key(Power.RUN)


def choose_engine_keys(env: Mapping[str, str], config: RunConfig, ports: Sequence[int]) -> EngineKeys:
    """A random key for each started engine, or the keys of configured engines from the environment.

    Raises ConfigError when a configured engine off loopback has no key.
    """
    if config.engine.urls:
        keys = EngineKeys.from_env(env)
        keys.check(config.engine.urls)
        return keys
    return EngineKeys(by_url={parts.engine_url(port): new_engine_key() for port in ports})


def choose_ports(config: RunConfig) -> tuple[int, tuple[int, ...], str | None]:
    """As `parts.choose_ports`, but with the proxy's previous port if it is free; else also returns a note."""
    before = None if config.proxy.port else _port_before(config.run_dir)
    note = None
    try:
        proxy, engines = parts.choose_ports(config, before or 0)
    except UserError:
        if before is None:
            raise
        proxy, engines = parts.choose_ports(config)
        note = f"the proxy's previous port {before} is in use: it moved to {proxy} (set proxy.port for a fixed port)"
    if not config.proxy.port:
        (config.run_dir / PORT_FILE).write_text(str(proxy))
    return proxy, engines, note


def _port_before(run_dir: Path) -> int | None:
    """The port of the last start; None at the first start and for an invalid file."""
    try:
        port = int((run_dir / PORT_FILE).read_text())
    except (OSError, ValueError):
        return None
    return port if 0 < port < 65536 else None


@contextmanager
def env_file(plan: Plan) -> Iterator[Path]:
    """Write `env` with mode 0600 to the run's folder, and remove it when the block ends.

    It has the run's key but not the admin key, so it gives access to the run and not to the proxy's administration.
    """
    path = plan.config.run_dir / ENV_FILE
    path.unlink(missing_ok=True)  # left by a killed supervisor
    variables = {PROXY_URL: plan.proxy_url, RUN_KEY: plan.run_key}
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.writelines(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
