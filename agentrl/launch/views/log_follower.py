"""Keeps the text of a run's trajectories in its folder, if `rollout.dump_to_file` is set."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.export.areal_dump import tokenizer
from agentrl.export.trajectory_log import NoRoom, TrajectoryLog
from agentrl.store import Database, runs

POLL_S = 1.0
FIELD = "rollout.dump_to_file"


def check(config: RunConfig, model: Path) -> None:
    """Raise UserError if the run's trajectories cannot be decoded."""
    if config.rollout.dump_to_file:
        tokenizer(model, FIELD)


def finish(config: RunConfig, database: Database, run_id: str, note: Callable[[str], None]) -> None:
    """Write what is missing of an ended run."""
    if config.rollout.dump_to_file:
        try:
            _log(config, database, run_id, note).catch_up()
        except (NoRoom, OSError) as error:
            note(_problem(error))


async def follow(config: RunConfig, database: Database, run_id: str, note: Callable[[str], None]) -> None:
    """Write the groups that end, in a thread beside the run, until this is cancelled.

    A full disk, or one that cannot be written, is noted, and does not stop the run.
    """
    if not config.rollout.dump_to_file:
        return
    stop = threading.Event()
    try:
        await asyncio.to_thread(_follow, config, database, run_id, note, stop)
    finally:
        stop.set()


def _follow(
    config: RunConfig, database: Database, run_id: str, note: Callable[[str], None], stop: threading.Event
) -> None:
    log = _log(config, database, run_id, note)
    noted = ""
    while not stop.wait(POLL_S):
        try:
            log.catch_up(stop.is_set)
        except (NoRoom, OSError) as error:
            if (problem := _problem(error)) != noted:
                note(problem)
            noted = problem
        else:
            noted = ""


def _log(config: RunConfig, database: Database, run_id: str, note: Callable[[str], None]) -> TrajectoryLog:
    model = Path(database.query(runs.get, run_id).base_model)
    return TrajectoryLog(database, run_id, config.run_dir, tokenizer(model, FIELD), note)


def _problem(error: Exception) -> str:
    text = str(error) if isinstance(error, NoRoom) else f"{FIELD}: {error}"
    return f"{text}; the groups are written when that is over"
