"""Evaluation episodes read from sessions: rewards, versions, faults."""

from __future__ import annotations

from play import begin_call, call, outcome
from sqlalchemy import update

from agentrl.domain import answer_text
from agentrl.domain.evaluation import Episode, Label, collect
from agentrl.domain.schemas import InteractionStatus, SessionStatus
from agentrl.store import evaluation_episodes, runs
from agentrl.store.calls import call_outcomes
from agentrl.store.db import codec
from agentrl.store.sessions import child_sessions, group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.training import rewards


def test_an_episode_has_the_answer_of_its_session(db, run_id, limits):
    given = {"42": "42", "x" * 600: answer_text.bounded("x" * 600), " ": None}
    for answer, kept in given.items():
        with db.write() as conn:
            new = group_starts.start_evaluation(conn, run_id, limits, [codec.new_id()], {}, {}, None)
            sealing.end(conn, new.session_ids[0], SessionStatus.COMPLETED, None, limits, answer=answer)
            again = sealing.end(conn, new.session_ids[0], SessionStatus.COMPLETED, None, limits, answer="another")
        assert again == SessionStatus.COMPLETED
        with db.read() as conn:
            assert evaluation_episodes.episodes(conn, run_id)[-1]["answer"] == kept


def test_a_failed_episode_is_a_fault_where_the_policy_did_not_answer(db, run_id, limits):
    def play(*calls: InteractionStatus, status: SessionStatus = SessionStatus.FAILED, below: bool = False) -> str:
        with db.write() as conn:
            new = group_starts.start_evaluation(conn, run_id, limits, [codec.new_id()], {}, {}, None)
            (session_id,) = new.session_ids
            caller = session_id
            if below:
                (caller,) = child_sessions.start_child(conn, session_id, limits, codec.new_id(), {}).session_ids
            for ended_as in calls:
                if ended_as == InteractionStatus.COMPLETE:
                    call(conn, run_id, caller)
                else:
                    call_id = begin_call(conn, run_id, caller)
                    call_outcomes.finish(conn, call_id, caller, outcome(status=ended_as))
            sealing.end(conn, session_id, status, "boom", limits)
        return session_id

    answered, failed = InteractionStatus.COMPLETE, InteractionStatus.FAILED
    expected = {
        play(): True,  # it could not start
        play(answered): False,
        play(answered, answered): False,
        play(failed): True,
        play(answered, failed): True,
        play(answered, below=True): False,
        play(answered, failed, below=True): True,
        play(answered, failed, status=SessionStatus.COMPLETED): False,  # the agent came through
        play(status=SessionStatus.ABANDONED): False,
    }
    with db.read() as conn:
        found = {row["session_id"]: row["fault"] for row in evaluation_episodes.episodes(conn, run_id)}
    assert found == expected


def test_stats_are_averaged_over_the_completed_sessions_of_a_setting(db, run_id, limits):
    def play(setting: str, index: int, status: SessionStatus, value: float) -> None:
        label = Label(step=0, version=0, episode=Episode(setting, index, 0), episodes=4)
        with db.write() as conn:
            new = group_starts.start_evaluation(conn, run_id, limits, [codec.new_id()], {}, label.metadata, None)
            call(conn, run_id, new.session_ids[0])
            sealing.end(conn, new.session_ids[0], status, None, limits, stats={"turns": value})

    play("greedy", 0, SessionStatus.COMPLETED, 1.0)
    play("greedy", 1, SessionStatus.COMPLETED, 2.0)
    play("greedy", 2, SessionStatus.FAILED, 9.0)
    play("sampled", 0, SessionStatus.COMPLETED, 4.0)
    with db.read() as conn:
        (found,) = collect(evaluation_episodes.episodes(conn, run_id))
    settings = found.as_json()["settings"]
    assert {name: one["stats"] for name, one in settings.items()} == {
        "greedy": {"turns": 1.5},
        "sampled": {"turns": 4.0},
    }


def test_a_sample_is_scored_by_a_reward_or_by_a_number_of_its_episode(db, run_id, limits):
    with db.write() as conn:
        new = group_starts.start_evaluation(conn, run_id, limits, [codec.new_id()], {}, {}, None)
        for name, value in (("right", 1.0), ("judge", 0.5), ("right", 0.0)):  # the last value of a name counts
            rewards.add(conn, new.session_ids[0], value=value, name=name, discount=1.0)
        sealing.end(conn, new.session_ids[0], SessionStatus.COMPLETED, None, limits, stats={"taste": 7.0})
    expected = [
        (None, None),
        ({"by": "judge"}, {"score": 0.5, "reward": 0.0}),
        ({"by": "taste", "rewards": None}, {"score": 7.0, "reward": 0.5}),
        ({"by": "taste", "rewards": ["right"]}, {"score": 7.0, "reward": 0.0}),
        ({"by": "nothing"}, {"score": None, "reward": 0.5}),
    ]
    for best_of, found in expected:
        with db.write() as conn:
            config = dict(runs.get(conn, run_id).config) | {"evaluation": {"samples": 2, "best_of": best_of}}
            conn.execute(update(runs.runs).where(runs.runs.c.id == run_id).values(config=config))
            (row,) = evaluation_episodes.episodes(conn, run_id)
        assert row.get("best_of") == found
