"""Random operations of proxies, workers and trainers on the store, compared with a simple model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import FAILED, Call, Group, Model, Reward, Session, Step
from play import Clock, begin_call, facts, outcome
from run_records import create_run
from sqlalchemy import Connection, select
from thoroughness import examples

from agentrl.domain.schemas import Batch, InteractionStatus, SessionStatus, TrainedBatch, VersionSpan
from agentrl.errors import FencedError, RequestError, StoreError
from agentrl.store import Database, heartbeats, runs
from agentrl.store.audit import run_audit
from agentrl.store.calls import call_outcomes, running_calls
from agentrl.store.db import codec
from agentrl.store.sessions import child_sessions, group_starts
from agentrl.store.sessions.ends import liveness, sealing, session_rewards
from agentrl.store.sessions.group_starts import NewGroup
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import groups, trajectories, weight_versions
from agentrl.store.tables import rewards as rewards_table
from agentrl.store.tables import sessions as sessions_table
from agentrl.store.tables import steps as steps_table
from agentrl.store.training import step_resume, steps, trainer_epochs, version_states

LIMITS = Limits(
    group_size=2,
    min_group_size=1,
    max_concurrent_groups=4,
    max_staleness=1,
    groups_per_step=1,
    turn_discount=0.5,
    reward_timeout_s=0.0,
    end_grace_s=30.0,
    session_timeout_s=900.0,
    session_max_s=5000.0,
    heartbeat_timeout_s=60.0,
    max_subagent_depth=2,
    max_subagents_per_session=3,
)
TARGET_STEPS = 12
picks = st.integers(0, 63)  # which of those there are, counted from the newest
spans_of = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), min_size=1, max_size=2)


@dataclass
class Trainer:
    """A trainer process: what it holds in memory."""

    epoch: int
    step: int
    batch: Batch | None = None  # leased, not completed
    unpublished: int | None = None


@dataclass
class Checkpoint:
    """What a checkpoint names: the step, and what completing it takes."""

    step_id: str
    record: TrainedBatch


def _code(error: Exception) -> str:
    assert isinstance(error, RequestError), error
    return error.code


class StoreMachine(RuleBasedStateMachine):
    """One run, its model, and one trainer at a time; `db` and `clock` are shared by the examples of a test."""

    db: Database
    clock: Clock

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
        self.trainer: Trainer | None = None
        self.checkpoints: list[Checkpoint] = []
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

    # sessions

    def _start(self, start: Callable[..., NewGroup], group: Group, *args: Any, counted: bool = True) -> None:
        has_place = not counted or self.model.has_capacity()
        earlier = next((g for g in self.model.groups if group.digest is not None and g.digest == group.digest), None)
        new = self._try(lambda conn: start(conn, self.run_id, self.model.limits, *args, start_digest=group.digest))
        if isinstance(new, Exception):
            assert (_code(new), has_place, earlier) == ("no_capacity", False, None)
            return
        if earlier is not None:
            roots = [s.id for s in earlier.sessions if s.parent is None]
            assert (new.group_id, new.session_ids) == (earlier.id, roots)
            return
        assert has_place
        group.id = new.group_id
        self.model.start(group, new.session_ids)

    @rule(
        kind=st.sampled_from(["own", "external", "evaluation"]),
        size=st.integers(1, 2),
        owner=st.sampled_from([None, "worker"]),
        digest=st.sampled_from([None, "a", "b"]),
    )
    def start(self, kind, size, owner, digest):
        """Three kinds of groups; a digest that came before gets what it started."""
        keys, digest = [codec.new_id() for _ in range(size)], digest and f"{digest} {kind}"
        if kind == "own":
            group = Group("", False, size, owner=owner, digest=digest)
            self._start(partial(group_starts.start_group, owner=owner), group, keys)
        elif kind == "external":
            self._start(group_starts.start_external, Group("", False, 1, digest=digest), keys[:1], {"n": 1}, {})
        else:
            group = Group("", True, size, digest=digest)
            self._start(group_starts.start_evaluation, group, keys, {"n": 1}, {}, None, counted=False)

    @precondition(lambda self: self.model.sessions)
    @rule(pick=picks)
    def start_child(self, pick):
        parent = self._session(pick)
        new = self._try(lambda conn: child_sessions.start_child(conn, parent.id, self.model.limits, codec.new_id(), {}))
        refusal = self.model.refuses_child(parent)
        if isinstance(new, Exception):
            assert _code(new) == refusal
            return
        assert refusal is None
        (child_id,) = new.session_ids
        now = self.model.now
        parent.group.sessions.append(Session(child_id, parent.group, parent, now, now))

    @precondition(lambda self: self.model.sessions)
    @rule(pick=picks, status=st.sampled_from([s for s in SessionStatus if s not in ("open", "closing")]))
    def end(self, pick, status):
        self._end(self._session(pick), status)

    def _end(self, session: Session, status: SessionStatus) -> None:
        self.model.end(session, status.value)
        with self.db.write() as conn:
            assert sealing.end(conn, session.id, status, None, self.model.limits) == session.status

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

    def _play_a_call(self, session: Session, above: Call | None, back: int, role: str = "main") -> Call:
        self._call(session, above, role, "r", [1, 2])
        self._commit(session.calls[-1], "complete", [(back, 2)])
        return session.calls[-1]

    # calls

    @precondition(lambda self: self.model.sessions)
    @rule(
        pick=picks,
        parent=st.one_of(st.none(), picks),
        role=st.sampled_from(["main", "main", "side"]),
        replica=st.sampled_from(["r", "s"]),
        delta=st.lists(st.integers(0, 9), max_size=2),
    )
    def begin_call(self, pick, parent, role, replica, delta):
        session = self._session(pick)
        delivered = session.complete
        above = delivered[-1 - parent % len(delivered)] if delivered and parent is not None else None
        self._call(session, above, role, replica, delta)

    def _call(self, session: Session, above: Call | None, role: str, replica: str, delta: list[int]) -> None:
        trainable = not session.group.is_eval
        call_id = self._try(
            lambda conn: begin_call(
                conn,
                self.run_id,
                session.id,
                parent=above.id if above else None,
                delta=delta,
                role=role,
                trainable=trainable,
                replica=replica,
            )
        )
        if isinstance(call_id, Exception):
            assert (_code(call_id), session.status != "open") == ("session_sealed", True)
            return
        assert session.status == "open"
        before = [*above.prompt, *above.output] if above is not None else []
        session.calls.append(
            Call(call_id, session, above, role, replica, trainable, prompt=[*before, *delta], delta=delta)
        )

    @precondition(lambda self: self.model.calls)
    @rule(pick=picks, spans=spans_of, aborted=st.sampled_from([False, False, False, True]))
    def finish_call(self, pick, spans, aborted):
        running = [c for c in self.model.calls if c.status == "running"] or self.model.calls
        self._commit(running[-1 - pick % len(running)], "aborted" if aborted else "complete", spans)

    def _commit(self, call: Call, status: str, wanted: list[tuple[int, int]]) -> None:
        """`wanted`: (how many versions back from the newest, tokens) of each span."""
        spans: list[tuple[int, int, int]] = []
        output: list[int] = []
        for back, n in wanted:
            version = max(0, max(self.model.parents) - back)
            spans.append((version, len(output), len(output) + n))
            output += [7] * n
        if call.session.built:
            expected: str | None = "sealed"
        else:
            expected = None if call.status == "running" else "is not running"
        sampled = outcome(
            delta=call.delta,
            output=output,
            status=InteractionStatus(status),
            spans=[VersionSpan(version=v, start=a, end=b) for v, a, b in spans],
        )
        seq = self._try(lambda conn: call_outcomes.finish(conn, call.id, call.session.id, sampled))
        if isinstance(seq, Exception):
            assert expected is not None, seq
            assert expected in str(seq)
            return
        assert expected is None
        self.model.commit(call, status, output, spans)
        assert seq == call.seq

    @precondition(lambda self: any(c.status == "running" for c in self.model.calls))
    @rule(pick=picks, status=st.sampled_from(["aborted", "failed", "lost"]))
    def fail_call(self, pick, status):
        """A call gives up, or its replica is declared lost with all that it served."""
        running = [c for c in self.model.calls if c.status == "running"]
        call = running[pick % len(running)]
        if status == "lost":
            self._lose(call.replica)
            return
        with self.db.write() as conn:
            running_calls.fail(conn, call.id, InteractionStatus(status), "boom")
        call.status = status
        call.session.seen = self.model.now

    def _lose(self, replica: str) -> None:
        lost = [c for c in self.model.calls if c.status == "running" and c.replica == replica]
        with self.db.write() as conn:
            assert running_calls.declare_lost(conn, self.run_id, replica) == len(lost)
        for call in lost:
            call.status = "lost"

    # rewards

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
        return len(due)

    # the trainer

    @rule(crash=st.sampled_from([None, None, None, "before completing", "before publishing"]))
    def start_trainer(self, crash):
        """A new epoch, resumed from the newest checkpoint that survives; it may die on the way."""
        model = self.model
        with self.db.write() as conn:
            epoch = trainer_epochs.begin_epoch(conn, self.run_id)
        model.epoch += 1
        assert epoch == model.epoch
        states = {s.id: s.state for s in model.steps}
        with self.db.read() as conn:
            for checkpoint in self.checkpoints:
                survives = states[checkpoint.step_id] != "rolled_back"
                assert steps.survives(conn, self.run_id, checkpoint.step_id) == survives
        self.checkpoints = [c for c in self.checkpoints if states[c.step_id] != "rolled_back"]
        anchor = self.checkpoints[-1] if self.checkpoints else None
        with self.db.write() as conn:
            plan = step_resume.reconcile(conn, self.run_id, epoch, anchor.step_id if anchor else None)
        kept = next((s for s in model.steps if anchor and s.id == anchor.step_id), None)
        number, forward = (kept.number, kept.state == "started") if kept else (0, False)
        later = [s for s in model.surviving if s.number > number]
        for step in later:
            model.roll_back(step)
        model.published_step = min(model.published_step, number - forward)
        version = (kept.before if forward else kept.after) if kept else 0
        if forward:
            kept.epoch = epoch
        republish = version if not forward and model.current_version != version else None
        assert (plan.step, plan.version, plan.roll_forward) == (number, version, forward)
        assert (plan.rolled_back_steps, plan.republish) == ([s.number for s in later], republish)
        self.trainer = Trainer(epoch, number, unpublished=republish)
        if crash == "before completing":
            self.trainer = None
        elif forward:
            self._complete(kept, anchor.record)
        if crash == "before publishing":
            self.trainer = None
        elif self.trainer is not None and self.trainer.unpublished is not None:
            self.publish(by_proxy=False)

    @rule(checkpoint=st.booleans())
    def train_a_step(self, checkpoint):
        """What a trainer does most."""
        if self.trainer is None:
            self.start_trainer(crash=None)
        assert self.trainer is not None
        if self.trainer.batch is None:
            self.lease()
        if self.trainer.batch is not None:
            self.train(checkpoint=checkpoint, crash=False)
            self.publish(by_proxy=False)

    @precondition(lambda self: self.trainer is not None and self.trainer.batch is None)
    @rule()
    def lease(self):
        model, trainer = self.model, self.trainer
        assert trainer is not None
        before = model.surviving[-1].after if model.surviving else 0
        assert before is not None
        taken = model.claim(before, model.limits.groups_per_step)
        with self.db.write() as conn:
            step_id = self._lease(conn, trainer.epoch, trainer.step + 1)
        if taken is None:
            assert step_id is None
            return
        assert step_id is not None
        model.lease(Step(step_id, trainer.step + 1, trainer.epoch, before, taken))
        with self.db.write() as conn:
            assert self._lease(conn, trainer.epoch, trainer.step + 1) == step_id
            trainer.batch = steps.batch(conn, step_id)
        self._compare(trainer.batch, model.steps[-1])

    def _lease(self, conn, epoch: int, step: int) -> str | None:
        limits = self.model.limits
        return steps.lease(
            conn,
            self.run_id,
            epoch,
            step=step,
            n_groups=limits.groups_per_step,
            max_staleness=limits.max_staleness,
            discount=limits.turn_discount,
            stale_policy=self.model.policy,
        )

    def _compare(self, batch: Batch, step: Step) -> None:
        """Tokens, masks and returns of a batch are what the model says."""
        model, found = self.model, {}
        for t in batch.trajectories:
            found[t.group_id, t.input_ids.tobytes(), t.session_id, t.turn_returns.tobytes(), t.loss_mask.tobytes()] = t
        expected = 0
        for group in step.groups:
            for session in group.sessions:
                valued = model.returns(session)
                for leaf, path in model.trajectories(session).items():
                    if path.step != step.id:
                        continue
                    expected += 1
                    calls, owned = model.paths(session)[leaf]
                    mask: list[bool] = []
                    for call in calls:
                        trains = call in owned and call.trainable and call.id in valued and path.state == "leased"
                        mask += [False] * len(call.delta)
                        for version, a, b in call.spans:
                            young = model.age(version, step.before) <= model.limits.max_staleness
                            mask += [trains and young] * (b - a)
                    tokens = [*calls[-1].prompt, *calls[-1].output]
                    mine = [
                        t
                        for t in batch.trajectories
                        if t.session_id == session.id
                        and t.input_ids.tolist() == tokens
                        and t.loss_mask.tolist() == mask
                    ]
                    assert mine, (tokens, mask)
                    turns = [valued.get(call.id, 0.0) for call in calls]
                    assert any(t.turn_returns.tolist() == pytest.approx(turns) for t in mine)
                    assert mine[0].episode_return == pytest.approx(path.value)
                    assert mine[0].episode_id == session.root.id
        assert len(batch.trajectories) == expected

    @precondition(lambda self: self.trainer is not None and self.trainer.batch is not None)
    @rule(checkpoint=st.sampled_from([True, True, False]), crash=st.sampled_from([False, False, False, True]))
    def train(self, checkpoint, crash):
        """Checkpoint (not every step), then complete; it may die in between."""
        trainer = self.trainer
        assert trainer is not None
        assert trainer.batch is not None
        record = facts(trainer.batch)
        if checkpoint:
            self.checkpoints.append(Checkpoint(record.step_id, record))
        if crash:
            self.trainer = None
            return
        self._complete(next(s for s in self.model.steps if s.id == record.step_id), record)

    def _complete(self, step: Step, record: TrainedBatch) -> None:
        trainer = self.trainer
        assert trainer is not None
        with self.db.read() as conn:
            assert steps.batch(conn, step.id).digest() == record.digest
            version = version_states.next_version(conn, self.run_id)
        for _ in range(2):  # a repetition is harmless
            with self.db.write() as conn:
                steps.complete(
                    conn, self.run_id, trainer.epoch, record, metrics={}, version=version, path="p", checksum="c"
                )
        self.model.complete(step, version)
        trainer.step, trainer.batch, trainer.unpublished = step.number, None, version

    @precondition(lambda self: self.trainer is not None and self.trainer.unpublished is not None)
    @rule(by_proxy=st.booleans())
    def publish(self, by_proxy):
        trainer, model = self.trainer, self.model
        assert trainer is not None
        version = trainer.unpublished
        assert version is not None
        number = next((s.number for s in model.steps if s.after == version), 0)
        if by_proxy and number < model.published_step:
            return
        with self.db.write() as conn:
            version_states.mark_published(conn, self.run_id, version, None if by_proxy else trainer.epoch)
        model.publish(version)
        trainer.unpublished = None

    @rule(pick=picks)
    def proxy_publishes_what_it_had_begun(self, pick):
        """A proxy that finishes an old publish only moves the run forward, and never to what was rolled back."""
        model = self.model
        version = max(model.parents) - pick % len(model.parents)
        number = next((s.number for s in model.steps if s.after == version), 0)
        refused = model.version_states[version] == "rolled_back" or number < model.published_step
        answer = self._try(lambda conn: version_states.mark_published(conn, self.run_id, version))
        assert isinstance(answer, StoreError) == refused
        if not refused:
            model.publish(version)

    @rule()
    def crash(self):
        self.trainer = None

    @precondition(lambda self: self.model.epoch > 1)
    @rule(pick=picks)
    def old_trainer(self, pick):
        """Stopped and continued after a newer trainer had started: it can do nothing."""
        old = 1 + pick % (self.model.epoch - 1)
        record = TrainedBatch(step_id="x", digest="", estimator="grpo", wasted_tokens=0, trained=[])
        for attempt in (
            lambda conn: self._lease(conn, old, 1),
            lambda conn: steps.complete(conn, self.run_id, old, record, metrics={}, version=1, path="p", checksum="c"),
            lambda conn: version_states.mark_published(conn, self.run_id, self.model.current_version, old),
            lambda conn: step_resume.reconcile(conn, self.run_id, old, None),
        ):
            with pytest.raises(FencedError), self.db.write() as conn:
                attempt(conn)

    # what holds after every rule

    def _try(self, unit: Callable[[Connection], Any]) -> Any:
        """What a transaction returns, or the error that refused it."""
        try:
            with self.db.write() as conn:
                return unit(conn)
        except (RequestError, StoreError) as error:
            return error

    def _session(self, pick: int) -> Session:
        there = self.model.sessions
        return there[-1 - pick % len(there)]

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
