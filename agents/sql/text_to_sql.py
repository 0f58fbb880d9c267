"""Answers questions with SQL: the model may try queries on the database, and ends with one in a ```sql block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl import Result, ToolLoop, tool
from agentrl.agents.sql.sql_task import database_of, instructions, run_query, score


class Querying:
    """The tool of one episode."""

    def __init__(self, database: Path) -> None:
        self.database = database

    @tool
    def run_query(self, query: str) -> str:
        """Run a SELECT statement and return its rows.

        Args:
            query: One SELECT statement in SQLite's dialect.
        """
        return run_query(self.database, query)


class TextToSql:
    """Tasks have `question`, `query` (or BIRD's `SQL`), and `shop` or `db_id`.

    `databases` is the folder with a file `DB_ID/DB_ID.sqlite` for each `db_id`, as Spider and BIRD have it.
    """

    def __init__(self, databases: str | None = None, max_turns: int = 4, max_tokens: int = 512) -> None:
        self.databases, self.max_turns, self.max_tokens = databases, max_turns, max_tokens

    async def run(self, data: dict[str, Any], **extra: Any) -> Result:
        """Answer the question, and compare the rows."""
        database = database_of(data, self.databases)
        messages = [
            {"role": "system", "content": instructions(database)},
            {"role": "user", "content": data["question"]},
        ]
        tools = [Querying(database)]
        async with ToolLoop(extra, tools, max_turns=self.max_turns, max_tokens=self.max_tokens) as loop:
            await loop.run(messages)
            return await loop.result(score(database, data, loop.text))
