"""Reads the contents that many calls share (tools, system messages), by hash."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, select

from agentrl.store.db import codec
from agentrl.store.tables import contents


def load_contents(conn: Connection, hashes: Iterable[str]) -> dict[str | None, Any]:
    """Contents that calls share (tools, system messages), by hash."""
    rows = conn.execute(select(contents.c.hash, contents.c.body).where(contents.c.hash.in_(list(hashes))))
    return {row.hash: codec.unpack_json(row.body) for row in rows}
