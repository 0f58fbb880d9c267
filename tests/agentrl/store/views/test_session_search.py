"""Search: each filter finds what it names, page by page; what is read is bounded by rows and by time."""

from __future__ import annotations

import pytest
from history import LIMITS, History
from sqlalchemy import select, update

from agentrl.domain.schemas import Json, SessionStatus
from agentrl.store import Database, heartbeats
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.tables import contents, interaction_data, interactions, runs, sessions
from agentrl.store.tables import heartbeats as heartbeat_rows
from agentrl.store.views import session_search
from agentrl.store.views.said_text import AROUND
from agentrl.store.views.session_search import Wanted

LONG = 60.0  # seconds of a budget that no test uses up


@pytest.fixture
def history(db: Database) -> History:
    made = History(db, seed=5)
    made.train(2)
    made.evaluation()
    return made


def found(history: History, before: str | None = None, budget_s: float = LONG, **wanted) -> session_search.Found:
    return history.db.query(session_search.of_run, history.run_id, Wanted(**wanted), before, budget_s)


def ids(history: History, **wanted) -> list[str]:
    return [row["id"] for row in found(history, **wanted).rows]


def says(history: History, session_id: str, *, prompt: str = "", answer: str = "", tool: str | None = None) -> str:
    """Let the first call of a session say this; returns its id."""
    call = {"id": "1", "type": "function", "function": {"name": tool, "arguments": '{"place": "Oslo"}'}}
    message = {"role": "assistant", "content": answer} | ({"tool_calls": [call]} if tool else {})
    with history.db.write() as conn:
        one = conn.execute(
            select(interactions.c.id).where(interactions.c.session_id == session_id).order_by(interactions.c.id)
        ).scalars()
        call_id = next(iter(one.all()))
        conn.execute(
            update(interaction_data)
            .where(interaction_data.c.interaction_id == call_id)
            .values(
                new_messages=codec.pack_json([{"role": "user", "content": [{"type": "text", "text": prompt}]}]),
                answer=codec.pack_json(message),
            )
        )
    return call_id


def without_calls(history: History, status: SessionStatus, error: str | None) -> list[str]:
    with history.db.write() as conn:
        new = group_starts.start_group(conn, history.run_id, LIMITS, [codec.new_id() for _ in range(2)])
        for session_id in new.session_ids:
            sealing.end(conn, session_id, status, error, LIMITS)
    return sorted(new.session_ids, reverse=True)


def test_without_a_filter_all_sessions_come_newest_first_with_their_facts(history: History) -> None:
    rows = found(history).rows
    assert [row["id"] for row in rows] == sorted((row["id"] for row in rows), reverse=True)
    assert len(rows) == 9
    assert rows[0]["is_eval"]
    assert all(row["calls"] >= 1 and row["return_"] is not None and row["forks"] == [] for row in rows)


def test_pages_follow_each_other_without_gaps(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ids(history)
    monkeypatch.setattr(session_search, "PAGE", 2)
    for wanted in ({}, {"text": "say"}, {"status": "completed"}, {"low": 0.0}):
        seen: list[str] = []
        before = None
        while True:
            page = found(history, before, **wanted)
            seen += [row["id"] for row in page.rows]
            assert len(page.rows) <= 2
            if page.before is None:
                break
            before = page.before
        assert seen == whole, wanted


@pytest.mark.parametrize(
    "words",
    [
        "Grüße aus KÖLN",
        pytest.param("grüsse", marks=pytest.mark.long),
        pytest.param("oslo", marks=pytest.mark.long),
        'say "hi"\n\\o/',
        "50%_off",
        pytest.param("語", marks=pytest.mark.long),
    ],
)
def test_text_is_found_in_prompts_answers_and_arguments_in_any_case(history: History, words: str) -> None:
    one, *_ = ids(history)
    text = {"grüsse": "viele GRÜSSE", "Grüße aus KÖLN": "grüße aus köln"}.get(words, words)
    says(history, one, prompt=f"before {text} after" if words != "oslo" else "", tool="weather")
    assert ids(history, text=words) == [one]
    (row,) = found(history, text=words).rows
    assert row["hit"]["found"].lower() == words.lower()


@pytest.mark.long_on("postgresql")
def test_a_snippet_has_the_role_the_phrase_and_what_is_around_it(history: History) -> None:
    one = ids(history)[3]
    call_id = says(history, one, answer="x" * 200 + " needle " + "y" * 200)
    (row,) = found(history, text="NEEDLE").rows
    assert row["hit"] == {
        "call": call_id,
        "role": "assistant",
        "lead": "…" + "x" * (AROUND - 1) + " ",
        "found": "needle",
        "rest": " " + "y" * (AROUND - 1) + "…",
    }


def test_fields_that_are_not_text_are_not_searched(history: History) -> None:
    says(history, ids(history)[0], answer="x", tool="weather")
    for name in ("assistant", "tool_calls", "function", "content"):
        assert ids(history, text=name) == []


@pytest.mark.long_on("postgresql")
def test_shared_system_messages_are_searched(history: History) -> None:
    one = ids(history)[2]
    content = codec.Content.of([{"role": "system", "content": "You are a pirate."}])
    with history.db.write() as conn:
        conn.execute(contents.insert().values(hash=content.hash, body=content.body))
        conn.execute(update(interactions).where(interactions.c.session_id == one).values(system_hash=content.hash))
    (row,) = found(history, text="PIRATE").rows
    assert (row["id"], row["hit"]["role"], row["hit"]["found"]) == (one, "system", "pirate")


@pytest.mark.long_on("postgresql")
def test_a_tool_is_found_by_its_whole_name(history: History) -> None:
    first, second, *_ = ids(history)
    says(history, first, answer="let me look", tool="web_search")
    says(history, second, answer="web_search is a tool", tool="search")
    assert ids(history, tool="WEB_search") == [first]
    assert found(history, tool="search").rows[0]["hit"]["tool"] == "search"
    assert ids(history, tool="search", text="is a tool") == [second]
    assert ids(history, tool="web_search", text="is a tool") == []
    assert ids(history, tool="web") == []


def test_returns_are_bounded_on_either_side(history: History) -> None:
    known: dict[str, float] = {row["id"]: row["return_"] for row in found(history).rows}
    middle = sorted(known.values())[len(known) // 2]
    assert set(ids(history, low=middle)) == {one for one, value in known.items() if value >= middle}
    assert set(ids(history, high=middle)) == {one for one, value in known.items() if value <= middle}
    assert ids(history, low=middle, high=middle) == [one for one, value in known.items() if value == middle]
    assert ids(history, low=1e9) == []


def test_a_session_without_trajectories_and_rewards_has_no_return(history: History) -> None:
    failed = without_calls(history, SessionStatus.FAILED, None)
    assert not set(failed) & set(ids(history, low=-1e9))
    assert {row["return_"] for row in found(history).rows if row["id"] in failed} == {None}


def test_a_fork_reason_is_found_and_counted(history: History) -> None:
    one = ids(history)[4]
    with history.db.write() as conn:
        conn.execute(update(interactions).where(interactions.c.session_id == one).values(fork_reason="tools_changed"))
    (row,) = found(history, fork="tools_changed").rows
    assert row["id"] == one
    assert row["forks"] == [("tools_changed", row["calls"])]
    assert ids(history, fork="truncated") == []


def test_statuses_and_errors(history: History) -> None:
    failed = without_calls(history, SessionStatus.FAILED, "TimeoutError: 100% of_the time")
    given_up = without_calls(history, SessionStatus.ABANDONED, None)
    with history.db.write() as conn:
        going_on = group_starts.start_group(conn, history.run_id, LIMITS, [codec.new_id() for _ in range(2)])
    assert ids(history, status="failed") == failed
    assert ids(history, status="abandoned") == given_up
    assert ids(history, status="open") == sorted(going_on.session_ids, reverse=True)
    assert ids(history, error="timeouterror") == ids(history, error="100% OF_the") == failed
    assert ids(history, error="100%x") == ids(history, error="ofxthe") == []


def test_evaluations_and_training_are_told_apart(history: History) -> None:
    assert len(ids(history, is_eval=True)) == 1
    assert len(ids(history, is_eval=False)) == 8
    assert ids(history, is_eval=True, low=-1e9) == ids(history, is_eval=True)


@pytest.mark.long_on("postgresql")
def test_a_search_out_of_time_goes_on_where_it_stopped(history: History) -> None:
    """Without any time left, each answer still looks at one session."""
    whole, seen, answers, before = ids(history), list[str](), 0, None
    while True:
        page = found(history, before, 0.0, text="say")
        seen += [row["id"] for row in page.rows]
        answers += 1
        if page.before is None:
            break
        assert page.back_to is not None
        before = page.before
    assert set(seen) <= set(whole)
    assert answers > 2
    assert len(seen) == len(set(seen))


@pytest.mark.long_on("postgresql")
def test_a_quick_filter_is_not_slowed_by_a_session_with_a_huge_line(history: History) -> None:
    one = ids(history)[1]
    says(history, one, answer="z" * 10_000_000 + "needle")
    (row,) = found(history, text="needle").rows
    assert row["id"] == one
    assert len(row["hit"]["lead"]) == AROUND + 1


def test_sessions_of_other_runs_and_of_other_times_are_left_out(history: History) -> None:
    other = History(history.db, name="other", seed=6)
    other.train(1)
    whole = ids(history)
    assert not set(whole) & set(ids(other))
    assert found(history, text="nothing").looked_at == len(whole)
    with history.db.write() as conn:
        conn.execute(update(runs).where(runs.c.id == history.run_id).values(created_at=0.0))
        heartbeats.beat(conn, history.run_id, "worker", "w")
        conn.execute(update(heartbeat_rows).values(last_seen_at=1.0))  # silent since then: no session can be newer
    assert ids(history) == []


def test_a_run_without_sessions_has_looked_at_none(db: Database) -> None:
    empty = found(History(db))
    assert (empty.rows, empty.looked_at, empty.before) == ([], 0, None)
    assert db.query(lambda conn: conn.execute(select(sessions.c.id)).all()) == []


def test_json_that_is_no_message_is_searched_too(history: History) -> None:
    deep: Json = {"role": "user", "content": "needle"}
    for _ in range(100):
        deep = {"inner": [deep, None, 3, True]}
    with history.db.write() as conn:
        blobs = {"new_messages": codec.pack_json([deep]), "answer": codec.pack_json(None)}
        conn.execute(update(interaction_data).values(**blobs))
    assert len(ids(history, text="needle")) == 9
    assert ids(history, tool="x") == []
