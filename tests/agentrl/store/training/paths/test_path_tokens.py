"""Reads of a batch's rows, however many trajectories it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, event

from agentrl.store.calls import call_routing
from agentrl.store.db import id_lists
from agentrl.store.training import token_facts
from agentrl.store.training.paths import first_prompts

IDS = [f"{i:032x}" for i in range(9)]


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize(
    "read",
    [
        lambda conn: call_routing.of_trajectories(conn, dict.fromkeys(IDS, 1)),
        lambda conn: first_prompts.read(conn, IDS),
        lambda conn: token_facts.of_trajectories(conn, dict.fromkeys(IDS, "0")),
    ],
    ids=["experts", "first prompts", "facts"],
)
def test_no_statement_has_a_parameter_for_each_trajectory(
    db: Any, monkeypatch: pytest.MonkeyPatch, read: Callable[[Connection], Any]
) -> None:
    monkeypatch.setattr(id_lists, "MOST_IDS", 2)
    counts = []

    def counted(conn: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        counts.append(len(parameters))

    with db.read() as conn:
        event.listen(conn, "before_cursor_execute", counted)
        assert read(conn) == {}
    assert len(counts) >= 5
    assert max(counts) <= 4
