"""Weight folders that no engine will be told to load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Connection

from agentrl.store import runs
from agentrl.weights_folder import version_of


def unneeded(conn: Connection, run_id: str, names: Sequence[str], *, keep: int, unknown: bool) -> set[str]:
    """The folders, by name, of all versions but the one that the run serves and the newest `keep` not rolled back.

    `unknown` says whether this includes folders that the store does not know.
    """
    needed = {*runs.newest_versions(conn, run_id, keep), runs.get(conn, run_id).current_version}

    def is_unneeded(name: str) -> bool:
        row = runs.version(conn, run_id, version_of(name) or 0)
        if row is None or row.path is None or Path(row.path).name != name:
            return unknown
        return row.version not in needed

    return {name for name in names if is_unneeded(name)}
