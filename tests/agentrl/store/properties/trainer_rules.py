"""The trainer of the property test: it resumes, leases batches, completes and publishes steps, and crashes."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import precondition, rule
from play import facts

from agentrl.domain.schemas import Batch, TrainedBatch
from agentrl.errors import FencedError, StoreError
from agentrl.store.training import step_resume, steps, trainer_epochs, version_states

from .machine import Checkpoint, Machine, Trainer, picks
from .records import Step


class TrainerRules(Machine):
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
