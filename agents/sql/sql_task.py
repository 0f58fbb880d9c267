"""A question about a database: its prompt, its database, and the score of an answer.

Only the standard library is used, so that programs in environments of their own can import it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from agentrl.agents.sql.shop_database import shop
from agentrl.agents.sql.sql_reader import SqlError, read, same_rows, schema, table

INSTRUCTIONS = """You answer questions about this SQLite database:

{schema}

Call run_query to try a query. End with the query that answers the question:
```sql
SELECT ...
```"""
BLOCK = re.compile(r"```(?:sql)?\s*(.*?)(?:```|$)", re.DOTALL | re.IGNORECASE)


def database_of(task: dict[str, Any], databases: str | None = None) -> Path:
    """The file of a task's database. Raises ValueError for a name that leads out of the folder."""
    if "shop" in task:
        return shop(int(task["shop"]))
    name = str(task["db_id"])
    if databases is None or not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"db_id {name[:50]!r}: give agent_args.databases, the folder of the databases")
    return Path(databases) / name / f"{name}.sqlite"


def instructions(database: Path) -> str:
    """The system message."""
    return INSTRUCTIONS.format(schema=schema(database))


def run_query(database: Path, query: str) -> str:
    """The result of the tool: rows as text, or the error of the query."""
    try:
        return table(*read(database, query))
    except SqlError as error:
        return f"error: {error}"


def score(database: Path, task: dict[str, Any], answer: str) -> float:
    """1 if the answer's query gives the expected rows, in the expected order if there is one; 0.1 if it can be run.

    Raises SqlError when the task's own query cannot be run.
    """
    query = str(task.get("query") or task["SQL"])
    _, expected = read(database, query)
    blocks = BLOCK.findall(answer)
    try:
        _, rows = read(database, blocks[-1] if blocks else answer)
    except SqlError:
        return 0.0
    return 1.0 if same_rows(rows, expected, ordered="order by" in query.lower()) else 0.1
