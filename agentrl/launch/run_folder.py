"""A run's folder `runs/NAME/`: its lock, its configuration, its database, and what a resume may change."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from agentrl import location
from agentrl.configs.config_files import parse_config
from agentrl.configs.run_config import RunConfig
from agentrl.configs.trainer_config import CHANGEABLE_OF_TRAINER
from agentrl.domain.schemas import Json
from agentrl.environment import DATABASE_URL, without_password
from agentrl.errors import ConfigError, UserError
from agentrl.placement.run_secrets import SECRETS_FILE, read_secrets
from agentrl.store.db.sql_engines import sqlite_path

CHANGEABLE = (
    "steps",
    "epochs",
    "runs_dir",
    "database_url",
    "max_restarts",
    "engine",
    "placement",
    "slurm",
    "resources",
    "publish",
    "storage",
    "proxy",
    "reward.timeout_s",
    "reward.retries",
    "reward.processes",
    "reward.memory_mb",
    "reward.recycle_after",
    "reward.batch_wait_s",
    "rollout.max_concurrent_groups",
    "rollout.timeout_s",
    "rollout.dump_to_file",
    "rollout.top_logprobs",
    *CHANGEABLE_OF_TRAINER,
    "trainer.stop_timeout_s",
    "trainer.nonfinite",
    "evaluation.max_concurrent",
    "metrics",
    "evaluation.every",
    "evaluation.hold",
    "evaluation.hold_timeout_s",
)
"""Keys or sections that affect how a run is executed but not what it computes."""


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Lock the run's folder, creating it with mode 0700 if needed. Raises UserError when another process holds the
    lock.

    The operating system releases the lock when its process ends.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    run_dir.mkdir(mode=0o700, exist_ok=True)
    with (run_dir / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UserError(f"{run_dir} is in use by process {lock.read().strip() or '?'}") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def database_url(config: RunConfig) -> str:
    """The config's URL, else AGENTRL_DATABASE_URL, else the URL in the secrets of a run on many hosts, else the run's
    recorded URL, else SQLite in its folder.

    Raises UserError when the password of the recorded URL is unknown.
    """
    if url := config.database_url or os.environ.get(DATABASE_URL):
        return url
    if config.placement != "local" and (config.run_dir / SECRETS_FILE).exists():
        return read_secrets(config.run_dir)[DATABASE_URL]
    if location.has_database(config.run_dir):
        return location.database_in(config.run_dir, os.environ)
    return f"sqlite:///{config.run_dir.resolve() / location.SQLITE_FILE}"


def remember_database(run_dir: Path, url: str) -> None:
    """Record the database's URL, without its password, in the run's folder, unless it is the folder's SQLite file."""
    record = run_dir / location.DATABASE
    if (file := sqlite_path(url)) is not None:
        if file == (run_dir / location.SQLITE_FILE).resolve():
            record.unlink(missing_ok=True)
            return
        url = f"sqlite:///{file}"
    record.write_text(without_password(url))


def has_checkpoints(run_dir: Path) -> bool:
    """Whether the folder has a complete checkpoint."""
    return any((run_dir / "checkpoints").glob("step-*/meta.json"))


def check_new(config: RunConfig, database_url: str) -> None:
    """Raise UserError when the folder has checkpoints of a run that is not in the database."""
    if has_checkpoints(config.run_dir):
        raise UserError(
            f"{config.run_dir} has checkpoints, but {without_password(database_url)} has no run "
            f"{config.name!r}: restore its database, or give another database or another run name"
        )


def stored(config: RunConfig) -> Json:
    """The configuration as stored in the database: all fields, without the database's password."""
    url = config.database_url
    return config.model_dump(mode="json") | {"database_url": None if url is None else without_password(url)}


def write_config(config: RunConfig, path: Path) -> None:
    """Write all fields, so that the run is repeatable when defaults change. The file has mode 0600."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(yaml.safe_dump(_written(config), sort_keys=False))


def is_written(config: RunConfig, path: Path) -> bool:
    """Whether a file of `write_config` holds this configuration."""
    return path.exists() and yaml.safe_load(path.read_text()) == _written(config)


def _written(config: RunConfig) -> Json:
    return config.model_dump(mode="json") | {"runs_dir": str(config.runs_dir.resolve())}


def check_resume(old: Json, new: RunConfig) -> None:
    """Raise ConfigError, naming the key, when a resume changes what the run computes or reduces `steps`."""
    before, after = _flat(parse_config(old)), _flat(new)
    for key in sorted(before.keys() | after.keys()):
        changed = before.get(key) != after.get(key)
        if changed and not any(key == free or key.startswith(f"{free}.") for free in CHANGEABLE):
            raise ConfigError(
                f"run {new.name!r} exists with {key}={_show(before.get(key))}, not {_show(after.get(key))}: "
                "give another name, or restore the value to resume it"
            )
    if new.steps < before["steps"]:
        raise ConfigError(f"steps: run {new.name!r} was started with {before['steps']}; they may only grow")


def _flat(config: RunConfig) -> dict[str, Any]:
    def walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for key, child in value.items():
                yield from walk(f"{prefix}.{key}" if prefix else key, child)
        else:
            yield prefix, value

    return dict(walk("", config.model_dump(mode="json")))


def _show(value: object) -> str:
    return json.dumps(value)
