"""Writes the sequences of ended groups as text while a run goes on: AReaL's `dump_to_file`.

    group ends ──► its file is complete:  FOLDER/{rollout|eval-rollout}/VERSION/GROUP.jsonl, one line per sequence

VERSION is the newest version that sampled a token of the group. A file appears whole, and its name follows from the
store alone. So the files are also the record of what is written: after a crash the groups without a file are written.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from agentrl import files
from agentrl.domain.session_stats import EVALUATION, ROLLOUT
from agentrl.errors import UserError
from agentrl.export.areal_dump import Decode, line
from agentrl.store import Database
from agentrl.store.db import codec
from agentrl.store.exports import ended_groups
from agentrl.store.exports.ended_groups import EndedGroup

PAGE_GROUPS = 1000
SESSION_TOKENS = 2_000_000
"""Maximum tokens of a session's sequences in its file, unless the first sequence has more."""
LEAST_FREE_BYTES = 2**30
"""Nothing is written while the disk has less room: a log must not stop the run."""
CLOCK_SLACK_S = 3600.0
"""How much the clocks of proxies may differ: a group's id may be this much older than the group."""

Note = Callable[[str], None]


class NoRoom(UserError):
    """The disk has less room than a log may use."""


class TrajectoryLog:
    """The files of one run. Only one process may write them at a time."""

    def __init__(self, database: Database, run_id: str, folder: Path, decode: Decode, note: Note) -> None:
        self._database, self._run_id, self._folder = database, run_id, folder
        self._decode, self._note = decode, note
        self._after = ""  # every group whose id sorts before is written
        self._written = {file.stem for file in self._files("*.jsonl")}  # later groups that are written
        for draft in self._files(".*.part"):
            draft.unlink()

    def catch_up(self, stopped: Callable[[], bool] = lambda: False) -> int:
        """Write the groups that have ended since the last call; returns how many files were written.

        Raises OSError, and NoRoom; a later call continues.
        """
        horizon = codec.first_id(max(0.0, time.time() - CLOCK_SLACK_S))
        running = self._database.query(ended_groups.oldest_running, self._run_id)
        done = horizon if running is None else min(horizon, codec.stamp(running))
        count, after = 0, self._after
        while found := self._database.query(ended_groups.page, self._run_id, after, PAGE_GROUPS):
            for group in found:
                if stopped():
                    return count
                if group.id not in self._written:
                    count += self._write(group)
                    self._written.add(group.id)
            after = found[-1].id
        self._after = max(self._after, done)
        self._written = {group_id for group_id in self._written if group_id > self._after}
        return count

    def _write(self, group: EndedGroup) -> bool:
        version = self._database.query(ended_groups.newest_version, group.id)
        if version is None:
            return False
        if shutil.disk_usage(self._folder).free < LEAST_FREE_BYTES:
            raise NoRoom(f"rollout.dump_to_file: {self._folder} has less than {LEAST_FREE_BYTES:,} bytes of free space")
        folder = self._folder / (EVALUATION if group.is_eval else ROLLOUT) / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        with files.atomic_file(folder / f"{group.id}.jsonl") as draft, draft.open("wb") as out:
            for session_id in self._database.query(ended_groups.members, group.id):
                found, whole = self._database.query(ended_groups.sequences, session_id, SESSION_TOKENS)
                out.writelines(line(path, self._decode) for path in found)
                if not whole:
                    self._note(
                        f"rollout.dump_to_file: the log has only the first {len(found)} sequences of session "
                        f"{session_id}, which have {SESSION_TOKENS:,} tokens"
                    )
        return True

    def _files(self, pattern: str) -> list[Path]:
        return [file for name in (ROLLOUT, EVALUATION) for file in self._folder.glob(f"{name}/*/{pattern}")]
