"""Sessions whose agents let only some tokens train, or none: their trajectories, batches and audit."""

import pytest
from play import begin, call, finish, group, take
from sqlalchemy import select, update

from agentrl.domain.schemas import SessionStatus, VersionSpan
from agentrl.domain.verdicts import Verdict
from agentrl.errors import RequestError
from agentrl.store import runs
from agentrl.store.audit import run_audit
from agentrl.store.sessions import child_sessions, group_starts
from agentrl.store.sessions.ends import sealing, session_rewards
from agentrl.store.tables import interactions, sessions, trajectories
from agentrl.store.training import rewards


def play(db, run_id, limits, *verdicts, reward=1.0):
    """A group of two sessions with two calls each; `verdicts` are functions of the calls' ids. Returns its calls."""
    with db.write() as conn:
        new = group_starts.start_group(conn, run_id, limits, [f"{id(verdicts)}{i}" for i in range(2)])
        calls = []
        for session_id, verdict in zip(new.session_ids, verdicts, strict=True):
            first = call(conn, run_id, session_id)
            second = call(conn, run_id, session_id, parent=first, delta=(5,), output=(6, 7, 8))
            if reward is not None:
                rewards.add(conn, session_id, value=reward, discount=1.0)
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits, verdict(first, second))
            calls.append((session_id, first, second))
    return calls


def everything(first, second):
    return Verdict()


def rows(db, session_id):
    with db.read() as conn:
        found = conn.execute(select(trajectories).where(trajectories.c.session_id == session_id)).all()
        return [(row.state, row.reason, row.trainable_tokens) for row in found]


@pytest.mark.long_on("postgresql")
def test_only_the_ranges_of_the_verdict_enter_the_loss(db, run_id, limits):
    (chosen, _, _), _ = play(db, run_id, limits, lambda first, second: Verdict(ranges={second: [(1, 2)]}), everything)
    group(db, run_id, limits)
    assert rows(db, chosen) == [("ready", None, 1)]
    epoch = begin(db, run_id)
    batch = take(db, run_id, epoch, 1)
    masks = {t.session_id: t.loss_mask.tolist() for t in batch.trajectories}
    assert masks[chosen] == [False, False, False, False, False, False, True, False]
    assert sum(map(sum, masks.values())) == 1 + 3 * 5
    finish(db, run_id, epoch, batch)
    with db.read() as conn:
        assert list(run_audit.scan(conn, run_id)) == []


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize(("trained", "kept"), [((0, 1), False), ((1, 3), True)])
def test_the_versions_of_the_tokens_that_train_decide_whether_they_are_too_old(db, run_id, limits, trained, kept):
    for _ in range(3):  # versions 1 to 3
        group(db, run_id, limits, version=next_step(db, run_id) - 1)
        epoch = begin(db, run_id)
        finish(db, run_id, epoch, take(db, run_id, epoch, next_step(db, run_id), n_groups=1))
    with db.write() as conn:
        new = group_starts.start_group(conn, run_id, limits, ["x", "y"])
        for session_id in new.session_ids:
            spans = [VersionSpan(version=0, start=0, end=1), VersionSpan(version=3, start=1, end=3)]
            mixed = call(conn, run_id, session_id, output=(3, 4, 5), spans=spans)
            rewards.add(conn, session_id, value=1.0, discount=1.0)
            verdict = Verdict(ranges={mixed: [trained]})
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits, verdict)
    with db.read() as conn:
        found = conn.execute(select(trajectories).where(trajectories.c.session_id.in_(new.session_ids))).all()
        assert {(row.min_version, row.max_version) for row in found} == {(3, 3) if kept else (0, 0)}
    group(db, run_id, limits, version=3)
    epoch = begin(db, run_id)
    batch = take(db, run_id, epoch, 4, n_groups=2 if kept else 1)
    assert ({t.session_id for t in batch.trajectories} >= set(new.session_ids)) == kept
    finish(db, run_id, epoch, batch)
    with db.read() as conn:
        assert list(run_audit.scan(conn, run_id)) == []


def next_step(db, run_id):
    """The number of the next step."""
    return db.query(runs.get, run_id).published_step + 1


def test_a_rejected_session_is_not_trained_and_its_group_goes_on(db, run_id, limits):
    reject = Verdict(rejected="too easy")
    (left_out, _, _), (kept, _, _) = play(db, run_id, limits, lambda *_: reject, everything)
    assert rows(db, left_out) == [("rejected", "rejected: too easy", 5)]
    assert rows(db, kept) == [("rejected", "group_too_small", 5)]  # a group of one has no baseline
    with db.read() as conn:
        run = runs.get(conn, run_id)
        assert (run.returned, run.running) == (1, 0)
        assert list(run_audit.scan(conn, run_id)) == []


def test_a_rejected_group_is_not_trained_and_gives_its_place_back(db, run_id, limits):
    with db.write() as conn:
        new = group_starts.start_group(conn, run_id, limits, ["x", "y"])
        for session_id, reason in zip(new.session_ids, (None, "too easy"), strict=True):
            call(conn, run_id, session_id)
            rewards.add(conn, session_id, value=1.0, discount=1.0)
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits, reject_group=reason)
        run = runs.get(conn, run_id)
        assert (run.returned, run.running) == (1, 0)
    assert [rows(db, each) for each in new.session_ids] == [[("rejected", "rejected: too easy", 2)]] * 2
    with db.write() as conn:
        assert not session_rewards.reward(conn, new.session_ids[0], limits, value=0.0).applied
    with db.read() as conn:
        assert list(run_audit.scan(conn, run_id)) == []


@pytest.mark.long_on("postgresql")
def test_a_group_is_rejected_although_its_sessions_have_ended_themselves(db, run_id, limits):
    with db.write() as conn:
        new = group_starts.start_group(conn, run_id, limits, ["x", "y"])
        for session_id in new.session_ids:
            call(conn, run_id, session_id)
            rewards.add(conn, session_id, value=1.0, discount=1.0)
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits)
        assert runs.get(conn, run_id).returned == 0
        for _ in range(2):  # the second time it is rejected already
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits, reject_group="too easy")
    assert [rows(db, each) for each in new.session_ids] == [[("rejected", "rejected: too easy", 2)]] * 2
    with db.read() as conn:
        assert runs.get(conn, run_id).returned == 1
        assert list(run_audit.scan(conn, run_id)) == []


def test_a_late_reward_does_not_revive_a_rejected_session(db, run_id, limits):
    (session_id, _, _), _ = play(db, run_id, limits, lambda *_: Verdict(rejected="no"), everything, reward=None)
    with db.write() as conn:
        session_rewards.reward(conn, session_id, limits, value=1.0)
    assert rows(db, session_id) == [("rejected", "rejected: no", 5)]


def test_a_sub_agent_is_rejected_with_its_root(db, run_id, limits):
    with db.write() as conn:
        new = group_starts.start_group(conn, run_id, limits, ["x", "y"])
        for session_id in new.session_ids:
            child = child_sessions.start_child(conn, session_id, limits, f"key of {session_id}", {}).session_ids[0]
            call(conn, run_id, session_id)
            call(conn, run_id, child)
            rewards.add(conn, session_id, value=1.0, discount=1.0)
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits, Verdict(rejected="all"))
    assert rows(db, child) == [("rejected", "rejected: all", 2)]
    with db.read() as conn:
        assert list(run_audit.scan(conn, run_id)) == []


@pytest.mark.parametrize(
    ("ranges", "message"),
    [({"f" * 32: [(0, 1)]}, "no call"), ({None: [(0, 9)]}, "no range of its 2 tokens")],
)
def test_a_verdict_on_tokens_that_were_not_sampled_is_refused(db, run_id, limits, ranges, message):
    with db.write() as conn:
        new = group_starts.start_group(conn, run_id, limits, ["x", "y"])
        session_id = new.session_ids[0]
        made = call(conn, run_id, session_id)
    verdict = Verdict(ranges={key or made: value for key, value in ranges.items()})
    with pytest.raises(RequestError, match=message) as refused, db.write() as conn:
        sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits, verdict)
    assert (refused.value.status, refused.value.param) == (422, "trained_tokens")
    with db.read() as conn:
        assert conn.execute(select(sessions.c.status).where(sessions.c.id == session_id)).scalar_one() == "open"


@pytest.mark.long_on("postgresql")
def test_a_path_that_ends_with_an_episode_that_a_limit_ended_is_truncated(db, run_id, limits):
    """The agent's word or the last answer's length; only the path of the last main call, of a root session."""
    found = {}
    for name, said, lengthy in (("said", True, None), ("length", False, "last"), ("earlier", False, "first")):
        with db.write() as conn:
            new = group_starts.start_group(conn, run_id, limits, [f"{name}{i}" for i in range(2)])
            for session_id in new.session_ids:
                child = child_sessions.start_child(conn, session_id, limits, f"key of {session_id}", {}).session_ids[0]
                first = call(conn, run_id, session_id)
                fork = call(conn, run_id, session_id, parent=first, delta=(7,))
                last = call(conn, run_id, session_id, parent=first, delta=(8,))
                call(conn, run_id, child)
                side = call(conn, run_id, session_id, delta=(9,), role="side")
                chosen = {"last": [last, side], "first": [first, fork, side]}.get(lengthy or "", [])
                conn.execute(update(interactions).where(interactions.c.id.in_(chosen)).values(finish_reason="length"))
                found[last], found[fork] = name != "earlier", False
                rewards.add(conn, session_id, value=1.0, discount=1.0)
                verdict = Verdict(truncated=said)
                sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits, verdict)
    batch = take(db, run_id, begin(db, run_id), 1, n_groups=3)
    assert {t.calls[-1]: t.truncated for t in batch.trajectories if t.calls[-1] in found} == found
    assert not any(t.truncated for t in batch.trajectories if t.calls[-1] not in found)  # of the sub-agents
    assert len(batch.trajectories) == 3 * 2 * 3


def test_a_truncated_session_that_is_ended_again_keeps_its_first_end(db, run_id, limits):
    with db.write() as conn:
        new = group_starts.start_group(conn, run_id, limits, ["x", "y"])
        call(conn, run_id, new.session_ids[0])
        for truncated in (True, False):
            sealing.end(conn, new.session_ids[0], SessionStatus.COMPLETED, None, limits, Verdict(truncated=truncated))
        stored = conn.execute(select(sessions.c.verdict).where(sessions.c.id == new.session_ids[0])).scalar_one()
    assert Verdict.of(stored).truncated
