"""text_to_sql with LangGraph: `agent: [python, -m, agentrl.agents.sql.sql_langgraph]`.

Any Python with `langgraph` and `langchain-openai` will do. The URL and the key of the session are in the environment.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent

from agentrl.agents.sql import sql_task

MAX_STEPS = 9
"""Calls of the model and of the tool."""


def main() -> None:
    """Answer the question of AGENTRL_TASK_FILE, and write the reward."""
    task = json.loads(Path(os.environ["AGENTRL_TASK_FILE"]).read_text())
    database = sql_task.database_of(task, os.environ.get("SQL_DATABASES"))

    @tool
    def run_query(query: str) -> str:
        """Run a SELECT statement in SQLite's dialect, and return its rows."""
        return sql_task.run_query(database, query)

    model = ChatOpenAI(model="default", max_tokens=256)
    agent = create_react_agent(model, [run_query], prompt=sql_task.instructions(database))
    question, answer = {"messages": [("user", task["question"])]}, ""
    try:
        for state in agent.stream(question, {"recursion_limit": MAX_STEPS}, stream_mode="values"):
            answer = state["messages"][-1].text
    except GraphRecursionError:
        pass  # what it said last counts
    Path(os.environ["AGENTRL_REWARD_FILE"]).write_text(str(sql_task.score(database, task, answer)))


if __name__ == "__main__":
    main()
