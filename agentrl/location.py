"""Finds a run's database. The first rule that applies wins:

    --database-url URL      that database
    --run FOLDER            the database of the run in that folder (FOLDER is a path with a slash)
    AGENTRL_DATABASE_URL    that database
    --run NAME              the database of the run in runs/NAME
    nothing                 the database of the run in runs/ that was started last

A run's own SQLite file is in its folder. For any other database, `agentrl train` and `agentrl run create` write the URL
without its password into the folder. The password then comes from the folder's config.yaml, AGENTRL_DATABASE_URL, or
libpq's PGPASSWORD and ~/.pgpass.
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agentrl.environment import DATABASE_URL, MASK, without_password
from agentrl.errors import UserError

RUNS_DIR = Path("runs")
CONFIG, ENV_FILE, DATABASE, SQLITE_FILE = "config.yaml", "env", ".database", "agentrl.db"
LIBPQ_PASSWORDS = ("PGPASSWORD", "PGPASSFILE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """A database and the selected run in it."""

    database_url: str = field(repr=False)
    name: str | None
    """The run's name; None when the user gave a database but no run."""
    folder: Path | None = None
    """The run's folder; None when the user gave the database."""
    note: str | None = None
    """Names the run that was selected by default."""
    by_environment: bool = False
    """Whether AGENTRL_DATABASE_URL selected the database."""


def locate(run: str | None, database_url: str | None, env: Mapping[str, str], runs_dir: Path = RUNS_DIR) -> Location:
    """Find the database of a run, given by name or folder. Raises UserError with the list of known runs."""
    folder = Path(run) if run is not None and _is_path(run) else None
    name = run if folder is None else run_name(folder)
    if database_url:
        return Location(database_url=database_url, name=name)
    if folder is None and (url := env.get(DATABASE_URL)):
        return Location(database_url=url, name=name, by_environment=True)
    note = None
    if folder is None:
        folder = newest(runs_dir) if run is None else named(run, runs_dir)
        name = run_name(folder)
        if run is None:
            others = len(folders(runs_dir)) - 1
            note = f"run {name}, in {folder}" + (f": the newest of {others + 1}; --run names another" if others else "")
    return Location(database_url=database_in(folder, env), name=name, folder=folder, note=note)


def folders(runs_dir: Path = RUNS_DIR) -> list[Path]:
    """The folders of runs that have a database, the last started first."""
    found = [folder for folder in runs_dir.glob("*/") if has_database(folder)]
    return sorted(found, key=_started, reverse=True)


def newest(runs_dir: Path) -> Path:
    """The folder of the run that was started last. Raises UserError when there is none."""
    found = folders(runs_dir)
    if not found:
        raise UserError(
            f"which run? {runs_dir.absolute()} has no runs: give --run FOLDER, or --database-url (AGENTRL_DATABASE_URL)"
        )
    return found[0]


def named(run: str, runs_dir: Path) -> Path:
    """The folder of the run with this name. Raises UserError with the nearest name and the list of runs."""
    for folder in (runs_dir / run, Path(run)):
        if has_database(folder):
            return folder
    known = sorted(folder.name for folder in folders(runs_dir))
    near = difflib.get_close_matches(run, known, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    there = f"it holds {', '.join(known)}" if known else "it holds no run; --database-url names another database"
    raise UserError(f"no run {run!r} in {runs_dir.absolute()}{hint} {there}")


def has_database(folder: Path) -> bool:
    """Whether a run's folder has a database, or the URL of one."""
    return (folder / SQLITE_FILE).is_file() or (folder / DATABASE).is_file()


def database_in(folder: Path, env: Mapping[str, str]) -> str:
    """The URL of the database of the run in `folder`. Raises UserError when its password is unknown."""
    if not has_database(folder):
        raise UserError(f"{folder} has no run with a database")
    try:
        recorded = (folder / DATABASE).read_text().strip()
    except FileNotFoundError:
        return f"sqlite:///{(folder / SQLITE_FILE).resolve()}"
    for url in (env.get(DATABASE_URL), config_of(folder).get("database_url")):
        if url and without_password(url) == recorded:
            return str(url)
    if MASK not in recorded:
        return recorded
    if any(env.get(name) for name in LIBPQ_PASSWORDS) or (Path.home() / ".pgpass").exists():
        return recorded.replace(f":{MASK}@", "@")
    raise UserError(f"the run in {folder} uses {recorded}: set {DATABASE_URL}, or set PGPASSWORD to its password")


def proxy_of(folder: Path) -> dict[str, str]:
    """The variables with which programs reach the proxy of an active run; empty for other runs. Raises UserError."""
    path = folder / ENV_FILE
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    words = [shlex.split(line.removeprefix("export "))[0] for line in lines]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def run_name(folder: Path) -> str:
    """A run's name: from its configuration, else the folder's name."""
    return str(config_of(folder).get("name") or folder.resolve().name)


def config_of(folder: Path) -> dict[str, Any]:
    """The configuration file in a run's folder, not validated; empty when it is missing. Raises UserError."""
    path = folder / CONFIG
    try:
        found = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    return found if isinstance(found, dict) else {}


def _is_path(run: str) -> bool:
    return "/" in run or os.sep in run or run in (".", "..")


def _started(folder: Path) -> float:
    """The time of the run's last start (seconds since the epoch): each start writes the configuration."""
    paths = (folder / CONFIG, folder / SQLITE_FILE, folder / DATABASE)
    return next(path.stat().st_mtime for path in paths if path.exists())
