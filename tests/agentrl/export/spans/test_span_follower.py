"""Each ended session is sent once: after a restart, through an outage, and by several senders."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import history as history_module
import pytest
from history import LIMITS, History
from span_receiver import SpanReceiver
from sqlalchemy import update

from agentrl.domain.schemas import SessionStatus
from agentrl.export.spans import span_follower
from agentrl.export.spans.span_follower import POLL_S, SpanFollower
from agentrl.export.spans.trace_export import TraceExport
from agentrl.store import Database
from agentrl.store.exports import trace_rows
from agentrl.store.sessions.ends import trace_outbox
from agentrl.store.tables import interactions

Make = Callable[..., TraceExport]


def follower(played: History, export: TraceExport, stop: threading.Event | None = None) -> SpanFollower:
    return SpanFollower(played.db, played.run_id, export, stop or threading.Event())


def waiting(played: History) -> int:
    return played.db.query(trace_outbox.waiting, played.run_id)


def ended(played: History, groups: int = 2) -> None:
    for _ in range(groups):
        played.group()


def sessions(receiver: SpanReceiver) -> list[str]:
    return [span["agentrl.session.id"] for span in receiver.named("invoke_agent")]


def test_a_session_is_sent_once_with_its_calls(played: History, receiver: SpanReceiver, export_to: Make) -> None:
    new, sender = played.group(), follower(played, export_to())
    assert sender.step() == POLL_S
    assert sorted(sessions(receiver)) == sorted(new.session_ids)
    assert waiting(played) == 0
    assert max(receiver.counted().values()) == 1
    by_id = {span["span_id"]: span for span in receiver.spans}
    for call in receiver.named("chat"):
        session = by_id[call["parent_id"]]
        assert (
            call["trace_id"] == session["trace_id"] == session["agentrl.session.id"] == call["gen_ai.conversation.id"]
        )
        assert session["parent_id"] is None
        assert (call["kind"], session["kind"]) == ("client", "internal")
    for session in receiver.named("invoke_agent"):
        assert session["name"] == "invoke_agent a:b"
        of_it = [call for call in receiver.named("chat") if call["parent_id"] == session["span_id"]]
        assert session["agentrl.calls"] == len(of_it) > 0
        assert session["agentrl.output_tokens"] == sum(call["gen_ai.usage.output_tokens"] for call in of_it)
        assert "ready" in session["agentrl.trajectory.states"]
        assert isinstance(session["agentrl.return"], float)
        assert "agentrl.reward.reward" in session
        assert sum("agentrl.reward.turn" in call for call in of_it) == 1
    count = len(receiver.spans)
    sender.step()
    assert len(receiver.spans) == count


def test_sessions_of_a_run_without_traces_do_not_wait(
    played: History, receiver: SpanReceiver, export_to: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "LIMITS", LIMITS)
    ended(played)
    follower(played, export_to()).step()
    assert receiver.requests == []


def test_failed_sessions_say_so(played: History, receiver: SpanReceiver, export_to: Make) -> None:
    played.group(status=SessionStatus.FAILED)
    follower(played, export_to()).step()
    for session in receiver.named("invoke_agent"):
        assert session["error"] == session["error.type"] == session["agentrl.session.status"] == "failed"


@pytest.mark.long_on("postgresql")
def test_an_outage_loses_nothing_and_is_logged_rarely(
    played: History, receiver: SpanReceiver, export_to: Make, caplog: pytest.LogCaptureFixture
) -> None:
    ended(played, 3)
    receiver.stop()
    down = follower(played, export_to())
    with caplog.at_level(logging.WARNING, span_follower.__name__):
        pauses = [down.step() for _ in range(8)]
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert len(caplog.records) == 1
    assert receiver.url in caplog.text
    assert waiting(played) == 6
    receiver.start()
    assert down.step() == POLL_S
    assert waiting(played) == 0
    assert len(sessions(receiver)) == len(set(sessions(receiver))) == 6
    assert max(receiver.counted().values()) == 1


@pytest.mark.long_on("postgresql")
def test_what_was_sent_before_the_outage_is_not_sent_again(
    played: History, receiver: SpanReceiver, export_to: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.export.spans import trace_export

    monkeypatch.setattr(trace_export, "BATCH_SPANS", 4)
    ended(played, 4)
    receiver.refuse = lambda spans: 503 if len(receiver.spans) >= 12 else None
    one = follower(played, export_to())
    one.step()
    whole = 8 - waiting(played)
    assert 0 < whole < 8
    receiver.refuse = lambda spans: None
    again = follower(played, export_to())  # a restart
    again.step()
    assert waiting(played) == 0
    assert set(sessions(receiver)) == set(played.db.query(trace_rows._page, played.run_id, ""))
    assert sum(count - 1 for count in receiver.counted().values()) <= 12 + 4  # spans of sessions that were not complete


def test_claims_of_a_dead_sender_end(
    played: History, receiver: SpanReceiver, export_to: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(played)
    dead = played.db.transact(trace_outbox.claim, played.run_id, 1, 0.2)
    other = follower(played, export_to())
    other.step()
    assert len(sessions(receiver)) == 3
    assert dead[0] not in sessions(receiver)
    while waiting(played):
        other.step()
    assert sorted(sessions(receiver)) == sorted(set(sessions(receiver)))


def test_two_senders_share_the_sessions(
    played: History, receiver: SpanReceiver, export_to: Make, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_follower, "CLAIMED", 2)
    ended(played, 8)
    databases = [Database(database_url) for _ in range(2)]
    senders = [SpanFollower(database, played.run_id, export_to(database), threading.Event()) for database in databases]

    def send(one: SpanFollower) -> None:
        while waiting(played):
            one.step()

    threads = [threading.Thread(target=send, args=(one,)) for one in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for database in databases:
        database.close()
    assert len(sessions(receiver)) == 16
    assert max(receiver.counted().values()) == 1


def test_a_follower_that_is_told_to_stop_sends_what_waits(
    played: History, receiver: SpanReceiver, export_to: Make
) -> None:
    ended(played)
    stop = threading.Event()
    stop.set()
    follower(played, export_to(), stop).run()
    assert waiting(played) == 0
    assert len(sessions(receiver)) == 4


def test_a_stopped_follower_does_not_wait_for_a_receiver_that_is_down(
    played: History, receiver: SpanReceiver, export_to: Make
) -> None:
    ended(played)
    receiver.stop()
    stop = threading.Event()
    stop.set()
    one = follower(played, export_to(), stop)
    one.run()
    assert waiting(played) == 4


def test_contents_are_sent_only_where_they_are_asked_for(
    played: History, receiver: SpanReceiver, export_to: Make
) -> None:
    new = played.group()
    for _ in export_to().send(new.session_ids):
        pass
    assert not any("messages" in name or "instructions" in name for span in receiver.spans for name in span)
    receiver.spans.clear()
    for _ in export_to(contents=True, max_content_bytes=64).send(new.session_ids):
        pass
    for call in receiver.named("chat"):
        assert '"role":"user"' in call["gen_ai.input.messages"]
        assert '"finish_reason":"stop"' in call["gen_ai.output.messages"]
        assert len(call["gen_ai.input.messages"]) < 200


def test_a_rejected_session_does_not_block_the_others(
    played: History, receiver: SpanReceiver, export_to: Make, caplog: pytest.LogCaptureFixture
) -> None:
    ended(played)
    bad: list[str] = []

    def refuse(spans: list[dict]) -> int | None:
        bad[:] = bad or [spans[0]["span_id"]]
        return 400 if any(span["span_id"] in bad for span in spans) else None

    receiver.refuse = refuse
    with caplog.at_level(logging.WARNING, span_follower.__name__):
        follower(played, export_to()).step()
    assert waiting(played) == 0
    assert bad[0] not in receiver.counted()
    assert len(sessions(receiver)) == 3
    assert "has rejected 1 spans" in caplog.text


@pytest.mark.parametrize("times", [1, 3])
def test_a_repeated_export_names_the_same_spans(
    played: History, receiver: SpanReceiver, export_to: Make, times: int
) -> None:
    new = played.group()
    for _ in range(times):
        for _ in export_to().send(new.session_ids):
            pass
    assert set(receiver.counted().values()) == {times}


def test_a_call_names_the_backend_that_sampled_it(played: History, receiver: SpanReceiver, export_to: Make) -> None:
    """Where the engine of a call is not recorded, the run's backend."""
    new = played.group()
    with played.db.write() as conn:
        mine = interactions.c.session_id == new.session_ids[0]
        conn.execute(update(interactions).where(mine).values(engine_backend="vllm"))
    follower(played, export_to()).step()
    backends = {call["gen_ai.conversation.id"]: call["gen_ai.provider.name"] for call in receiver.named("chat")}
    assert backends == {new.session_ids[0]: "vllm"} | dict.fromkeys(new.session_ids[1:], "sglang")
