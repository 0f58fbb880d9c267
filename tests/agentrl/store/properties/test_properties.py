"""Random operations of proxies, workers and trainers on the store, compared with a simple model."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test
from play import Clock
from run_records import create_run
from sqlalchemy import select
from thoroughness import examples

from agentrl.domain.schemas import SessionStatus
from agentrl.store import Database, runs
from agentrl.store.audit import run_audit
from agentrl.store.db import codec
from agentrl.store.sessions.ends import liveness, missing_places
from agentrl.store.tables import groups, trajectories, weight_versions
from agentrl.store.tables import rewards as rewards_table
from agentrl.store.tables import sessions as sessions_table
from agentrl.store.tables import steps as steps_table

from .call_rules import CallRules
from .machine import LIMITS, TARGET_STEPS
from .model import Model
from .reward_rules import RewardRules
from .session_rules import SessionRules
from .trainer_rules import TrainerRules


class StoreMachine(SessionRules, CallRules, RewardRules, TrainerRules):
    """The rules of sessions, calls, rewards and trainers, and what holds after each."""

    @initialize(
        staleness=st.integers(0, 2),
        policy=st.sampled_from(["mask", "drop"]),
        min_group=st.integers(1, 2),
        per_step=st.integers(1, 2),
        reward_timeout=st.sampled_from([0.0, 50.0]),
        trained=st.integers(0, 3),
        kept=st.integers(0, 3),
        resumed=st.booleans(),
    )
    def begin_run(self, staleness, policy, min_group, per_step, reward_timeout, trained, kept, resumed):
        """A run that has trained some steps, the first of them with a checkpoint, and may have been resumed since."""
        limits = replace(
            LIMITS,
            max_staleness=staleness,
            min_group_size=min_group,
            groups_per_step=per_step,
            reward_timeout_s=reward_timeout,
        )
        self.model = Model(limits, target_steps=TARGET_STEPS, policy=policy, now=self.clock.now)
        self.trainer = None
        self.checkpoints = []
        name = codec.new_id()
        config = {"rollout": {"turn_discount": limits.turn_discount}}
        with self.db.write() as conn:
            self.run_id = create_run(
                conn, name=name, config=config, task_data=[{"n": i} for i in range(3)], key=name, steps=TARGET_STEPS
            )
        for step in range(trained):
            for _ in range(per_step):
                self.play_a_group(size=2, owner=None, backs=(0, 1), values=(0.0, 1.0), shape="fork")
            self.train_a_step(checkpoint=step < kept)
        if resumed:
            self.start_trainer(crash=None)

    @rule(
        size=st.integers(1, 2),
        owner=st.sampled_from([None, "worker"]),
        backs=st.tuples(st.integers(0, 3), st.integers(0, 3)),
        values=st.tuples(*[st.sampled_from([1.0, 0.0, None])] * 2),
        shape=st.sampled_from(["plain", "fork", "side", "child", "running"]),
    )
    def play_a_group(self, size, owner, backs, values, shape):
        """What happens most: a group starts, each session makes some calls, is rewarded, and ends."""
        known = len(self.model.groups)
        self.start(kind="own", size=size, owner=owner, digest=None)
        for group in self.model.groups[known:]:
            for i, session in enumerate(list(group.sessions)):
                first = self._play_a_call(session, None, backs[i])
                if shape == "child":
                    self.start_child(pick=0)
                    self._play_a_call(group.sessions[-1], None, backs[1 - i])
                elif shape == "running":
                    self._call(session, first, "main", "r", [4])
                elif shape != "plain":
                    self._play_a_call(session, first, backs[1 - i], "side" if shape == "side" else "main")
                    self._play_a_call(session, first, backs[1])
                if (value := values[i]) is not None:
                    self._reward(session, None, None, "reward", value, None)
                self._end(session, SessionStatus.COMPLETED)

    @invariant()
    def agrees(self):
        model = self.model
        with self.db.read() as conn:
            run = runs.get(conn, self.run_id)
            of_run = conn.execute(select(groups.c.id, groups.c.state).where(groups.c.run_id == self.run_id))
            assert {row[0]: row[1] for row in of_run} == {g.id: g.state for g in model.groups}
            table = sessions_table.c
            of_run = conn.execute(
                select(table.id, table.status, table.built, table.seq, table.ended_at).where(
                    table.run_id == self.run_id
                )
            )
            assert {row[0]: tuple(row[1:]) for row in of_run} == {
                s.id: (s.status, s.built, s.seq, s.ended) for s in model.sessions
            }
            of_run = conn.execute(
                select(rewards_table.c.id, rewards_table.c.applied).where(rewards_table.c.run_id == self.run_id)
            )
            assert {row[0]: row[1] for row in of_run} == {r.id: r.applied for s in model.sessions for r in s.rewards}
            t = trajectories.c
            of_run = conn.execute(
                select(
                    t.leaf_id,
                    t.state,
                    t.reason,
                    t["return"].label("value"),
                    t.trainable_tokens,
                    t.min_version,
                    t.max_version,
                    t.lease_step_id,
                ).where(t.run_id == self.run_id)
            )
            found = {row.leaf_id: row for row in of_run}
            expected = {leaf: path for s in model.sessions for leaf, path in model.trajectories(s).items()}
            assert found.keys() == expected.keys()
            for leaf, path in expected.items():
                row = found[leaf]
                assert (row.state, row.reason, row.lease_step_id) == (path.state, path.reason, path.step)
                assert (row.trainable_tokens, (row.min_version, row.max_version)) == (path.tokens, path.versions)
                assert math.isclose(row.value, path.value, abs_tol=1e-9)
            of_run = conn.execute(select(steps_table).where(steps_table.c.run_id == self.run_id))
            assert {(s.id, s.step, s.epoch, s.state, s.version_before, s.version_after) for s in of_run} == {
                (s.id, s.number, s.epoch, s.state, s.before, s.after) for s in model.steps
            }
            w = weight_versions.c
            of_run = conn.execute(select(w.version, w.parent_version, w.state).where(w.run_id == self.run_id))
            assert {tuple(row) for row in of_run} == {
                (v, parent, model.version_states[v]) for v, parent in model.parents.items()
            }
            assert (run.admitted, run.running, run.returned, run.data_cursor) == (
                len(model.training),
                model.running_groups,
                model.returned,
                model.cursor,
            )
            assert (run.trainer_epoch, run.published_step, run.current_version) == (
                model.epoch,
                model.published_step,
                model.current_version,
            )
            assert list(run_audit.scan(conn, self.run_id)) == []

    def teardown(self):
        """Nothing waits for ever: once every limit has passed, sweeps alone end all that is left."""
        if not hasattr(self, "model"):
            return
        for replica in ("r", "s"):
            self._lose(replica)
        for _ in range(4):
            self.sweep(seconds=LIMITS.session_max_s, outage=False)
        self.agrees()
        assert all(s.built for s in self.model.sessions)
        with self.db.read() as conn:
            assert liveness.due(conn, self.run_id) == []
            assert missing_places.due(conn, self.run_id) == []
        assert not any(g.waits for g in self.model.groups)


@pytest.mark.long_on("postgresql")
@pytest.mark.searches
def test_the_store_agrees_with_a_simple_model(fast_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.install(monkeypatch)
    machine = type("Machine", (StoreMachine,), {"db": fast_db, "clock": clock})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(15),
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )
