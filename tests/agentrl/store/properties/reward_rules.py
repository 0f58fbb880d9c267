"""Rewards and time of the property test: late rewards, timeouts, and signs of life."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import precondition, rule

from agentrl.errors import RequestError
from agentrl.store import heartbeats
from agentrl.store.sessions.ends import liveness, missing_places, session_rewards

from .machine import Machine, picks
from .records import FAILED, Call, Reward, Session


class RewardRules(Machine):
    @precondition(lambda self: self.model.sessions)
    @rule(
        pick=picks,
        call=st.one_of(st.none(), picks),
        branch=st.booleans(),
        name=st.sampled_from(["reward", "style"]),
        value=st.sampled_from([0.0, 1.0, -0.5]),
        key=st.sampled_from([None, "k", "l"]),
        late=st.booleans(),
    )
    def reward(self, pick, call, branch, name, value, key, late):
        ended = [s for s in self.model.sessions if s.built and s.group.state in ("running", "ready")]
        session = ended[-1 - pick % len(ended)] if late and ended else self._session(pick)
        of_call = session.calls[-1 - call % len(session.calls)] if session.calls and call is not None else None
        self._reward(session, of_call, "branch" if branch and of_call else None, name, value, key)

    def _reward(
        self, session: Session, call: Call | None, scope: str | None, name: str, value: float, key: str | None
    ) -> None:
        earlier = next((r for r in session.rewards if key is not None and r.key == key), None)
        ask = {"value": value, "interaction_id": call.id if call else None, "scope": scope, "name": name}
        if earlier is None and call is not None and call not in session.complete:
            with pytest.raises(RequestError, match="not delivered"), self.db.write() as conn:
                session_rewards.reward(conn, session.id, self.model.limits, **ask, idempotency_key=key)
            return
        with self.db.write() as conn:
            answer = session_rewards.reward(conn, session.id, self.model.limits, **ask, idempotency_key=key)
        if earlier is not None:
            assert (answer.reward_id, answer.applied) == (earlier.id, earlier.applied)
        else:
            in_time = session.group.state in ("running", "ready") and session.status not in FAILED
            applied = session.group.is_eval or in_time
            assert answer.applied == applied
            reach = scope or ("call" if call else "session")
            session.rewards.append(Reward(call, reach, name, value, applied, key, answer.reward_id))
        self.model.settle(session)

    # time

    @rule(seconds=st.sampled_from([0.0, 10.0, 40.0, 100.0, 1000.0]), outage=st.sampled_from([False, False, True]))
    def sweep(self, seconds, outage):
        """Time passes, and a replica looks at what is due; after an outage of all of them patience begins anew."""
        self.clock.now += seconds
        self.model.now = self.clock.now
        if outage:
            self.model.heard_since = self.model.now
        self._sweep()

    @precondition(lambda self: self.model.sessions)
    @rule(pick=picks, worker=st.booleans())
    def hear(self, pick, worker):
        """A worker or a session gives a sign of life."""
        session = self._session(pick)
        with self.db.write() as conn:
            if worker:
                heartbeats.beat(conn, self.run_id, "worker", "worker")
                self.model.beats["worker"] = self.model.now
            else:
                assert liveness.touch(conn, session.id) == session.status
                session.seen = self.model.now

    def _sweep(self) -> int:
        with self.db.read() as conn:
            due = liveness.due(conn, self.run_id)
        by_id = {s.id: s for s in self.model.sessions}
        for session_id in due:
            with self.db.write() as conn:
                liveness.check_due_session(conn, session_id, self.model.limits, heard_since=self.model.heard_since)
            if not by_id[session_id].built:
                self.model.look(by_id[session_id])
        by_group = {g.id: g for g in self.model.groups}
        with self.db.read() as conn:
            due_groups = missing_places.due(conn, self.run_id)
        for group_id in due_groups:
            with self.db.write() as conn:
                missing_places.check_due_group(conn, group_id, self.model.limits, heard_since=self.model.heard_since)
            self.model.look_at_group(by_group[group_id])
        return len(due)
