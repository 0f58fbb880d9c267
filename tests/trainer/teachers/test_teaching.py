"""A run's lessons: which groups a step teaches, by the sources of their tasks in the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loop_setup import Setup
from support import save_tiny_model

from agentrl.configs.algorithm import Algorithm
from agentrl.trainer.models import run_models
from agentrl.trainer.run import trainer_start


@pytest.fixture
def n_steps() -> int:
    return 2


@pytest.fixture
def teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder without a tokenizer."""
    monkeypatch.setattr(run_models, "resolve_model", Path)
    monkeypatch.setattr(run_models, "check_same_tokens", lambda *_: None)
    monkeypatch.setattr(trainer_start, "resolve_model", Path)
    return str(save_tiny_model(tmp_path / "teacher", seed=5))


@pytest.mark.parametrize("form", ["sampled", "full"])
def test_a_run_teaches_the_groups_of_its_sources(setup: Setup, teacher: str, form: Any) -> None:
    with setup.database.write() as conn:  # a second source, from which every other task was drawn
        conn.exec_driver_sql(
            "INSERT INTO task_sources SELECT run_id, 1, 'more', 1.0, 0, 0, 0, true, NULL, NULL FROM task_sources"
        )
        conn.exec_driver_sql("""UPDATE tasks SET data = '{"source": "a name in the data"}'""")
    assert setup.train(teacher={"more": teacher}, algorithm=Algorithm(distill_coef=0.5, distill=form))
    odd = "SELECT g.id FROM groups g JOIN tasks t ON t.id = g.task_id WHERE t.position % 2 = 1"
    rows = setup.query(
        f"""SELECT s.step, sum(CASE WHEN t.group_id IN ({odd}) THEN st.tokens_trained ELSE 0 END),
               sum(st.tokens_trained)
        FROM step_trajectories st JOIN steps s ON s.id = st.step_id JOIN trajectories t ON t.id = st.trajectory_id
        GROUP BY s.step ORDER BY s.step"""
    )
    assert setup.step_metrics("tokens_taught") == [taught for _, taught, _ in rows]
    assert setup.step_metrics("tokens_trained") == [trained for _, _, trained in rows]
    assert 0 < sum(taught for _, taught, _ in rows) < sum(trained for _, _, trained in rows)


def test_a_source_without_a_teacher_is_not_distilled(setup: Setup, teacher: str) -> None:
    assert setup.train(teacher={"another": teacher}, algorithm=Algorithm(distill_coef=0.5))
    assert setup.step_metrics("tokens_taught") == setup.step_metrics("kl_teacher") == [0, 0]
