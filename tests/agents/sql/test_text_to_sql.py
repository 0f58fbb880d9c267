"""The SQL agent: its episode, its rewards, its databases, and the same agent in other frameworks."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from agentrl.agents.sql.shop_database import heldout_tasks, shop, train_tasks
from agentrl.agents.sql.sql_reader import SqlError, read
from agentrl.agents.sql.sql_task import database_of, score
from agentrl.agents.sql.text_to_sql import TextToSql

TASK = {"shop": 3, "question": "?", "query": "SELECT name FROM products ORDER BY price DESC, name"}


async def test_the_model_tries_queries_and_answers_with_one(model: Any, extra: Any, said: Any) -> None:
    model.says([("run_query", {"query": "SELECT count(*) AS n FROM products"}), ("run_query", {"query": "nonsense"})])
    model.says("This is it:\n```sql\nSELECT name FROM products ORDER BY price DESC\n```")
    result = await TextToSql().run(TASK, **extra)
    assert said(1) == ["n\n8", 'error: near "nonsense": syntax error']
    assert "CREATE TABLE orders" in model.requests[0]["messages"][0]["content"]
    assert [reward.value for reward in result.rewards] == [1.0]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("SELECT name FROM products ORDER BY price DESC", 1.0),
        ("```sql\nnonsense\n```\n```SQL\nSELECT name FROM products ORDER BY price DESC", 1.0),
        ("```sql\nSELECT name FROM products ORDER BY price\n```", 0.1),
        ("```sql\nSELECT name FROM product\n```", 0.0),
        ("I do not know.", 0.0),
    ],
)
def test_an_answer_earns_what_its_rows_are_worth(answer: str, reward: float) -> None:
    assert score(shop(3), TASK, answer) == reward


def test_a_task_with_a_broken_query_fails_its_episode() -> None:
    with pytest.raises(SqlError):
        score(shop(3), TASK | {"query": "SELECT nothing"}, "SELECT 1")


def test_databases_are_found_by_id_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "cars").mkdir()
    with closing(sqlite3.connect(tmp_path / "cars" / "cars.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE cars (name TEXT)")
    task = {"db_id": "cars", "SQL": "SELECT count(*) FROM cars"}
    assert score(database_of(task, str(tmp_path)), task, "SELECT 0") == 1.0
    for name in ("../cars", "/etc", ".", ""):
        with pytest.raises(ValueError, match="the folder of the databases"):
            database_of({"db_id": name}, str(tmp_path))


def test_every_question_has_an_answer() -> None:
    for task in [*heldout_tasks(), *islice(train_tasks(), 200)]:
        columns, _ = read(shop(task["shop"]), task["query"])
        assert len(columns) == 1


def test_held_out_databases_are_not_trained() -> None:
    assert {task["shop"] for task in heldout_tasks()}.isdisjoint(task["shop"] for task in train_tasks())
