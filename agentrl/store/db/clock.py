"""The database's clock: one for all hosts of a run, whatever their own clocks say."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Float, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class now(FunctionElement[float]):
    """Seconds since the epoch when the statement runs, as an expression of SQL, also within a long transaction."""

    type = Float()
    inherit_cache = True


@compiles(now, "sqlite")
def _sqlite(element: now, compiler: Any, **_: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _postgresql(element: now, compiler: Any, **_: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


def database_time(conn: Connection) -> float:
    """Seconds since the epoch by the database's clock."""
    return float(conn.execute(select(now())).scalar_one())
