"""text_to_sql with the OpenAI Agents SDK: `agent: [python, -m, agentrl.agents.sql.sql_agents_sdk]`.

Any Python with `openai-agents` will do. The URL and the key of the session are in the environment.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from agents.exceptions import MaxTurnsExceeded

from agentrl.agents.sql import sql_task
from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api, set_tracing_disabled

MAX_TURNS = 4


def main() -> None:
    """Answer the question of AGENTRL_TASK_FILE, and write the reward."""
    task = json.loads(Path(os.environ["AGENTRL_TASK_FILE"]).read_text())
    database = sql_task.database_of(task, os.environ.get("SQL_DATABASES"))

    @function_tool
    def run_query(query: str) -> str:
        """Run a SELECT statement in SQLite's dialect, and return its rows."""
        return sql_task.run_query(database, query)

    set_tracing_disabled(True)
    set_default_openai_api("chat_completions")
    agent = Agent(
        name="text-to-sql",
        instructions=sql_task.instructions(database),
        model="default",
        model_settings=ModelSettings(max_tokens=256),
        tools=[run_query],
    )
    try:
        answer = str(Runner.run_sync(agent, task["question"], max_turns=MAX_TURNS).final_output)
    except MaxTurnsExceeded:
        answer = ""
    Path(os.environ["AGENTRL_REWARD_FILE"]).write_text(str(sql_task.score(database, task, answer)))


if __name__ == "__main__":
    main()
