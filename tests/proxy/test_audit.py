"""The audit finds nothing in honest rows and names the row that breaks a promise."""

import pytest
from sqlalchemy import text

from agentrl.store.audit import run_audit


@pytest.fixture
def played(proxy):
    """A group of two sessions with two bridged turns each."""
    for session in proxy.post("/groups").json()["sessions"]:
        sdk = proxy.sdk(session)
        messages = [{"role": "user", "content": "ab"}]
        for _ in range(2):
            answer = sdk.chat.completions.create(model="test", messages=messages)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "c"}]
        proxy.post(f"/sessions/{session['session_id']}/reward", {"value": 1.0})
        proxy.post(f"/sessions/{session['session_id']}/end")
    return proxy


def broken(proxy, statement=None):
    with proxy.database.write() as conn:
        if statement:
            conn.execute(text(statement))
        return list(run_audit.scan(conn, proxy.run_id))


def test_intact_rows_have_no_violation(played):
    assert broken(played) == []
    with played.database.read() as conn:
        figures = run_audit.figures(conn, played.run_id)
    assert (figures["calls"], figures["bridged"], figures["forked"]) == (4, 2, 0)


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("UPDATE interaction_data SET prompt_delta_ids = output_ids", "another prompt"),
        ("UPDATE interactions SET output_tokens = 99", "disagree"),
        ("UPDATE interaction_data SET spans = '[[0, 0, 1]]'", "do not cover"),
        ("UPDATE trajectories SET state = 'trained'", "trained by 0 surviving steps"),
        ("UPDATE runs SET admitted = 7", "counter admitted is 7"),
    ],
)
def test_a_violation_is_named(played, statement, complaint):
    assert any(complaint in line for line in broken(played, statement))
