"""A run with a past, made up from a seed: groups of every fate, rewards, evaluations, steps."""

from __future__ import annotations

import random
import time

import numpy as np
from run_records import create_run

from agentrl.domain.batches.reward_scaling import Scale
from agentrl.domain.schemas import (
    FACTS,
    MASKED_FACTS,
    Batch,
    InteractionStatus,
    SessionStatus,
    TokenFacts,
    TrainedBatch,
    TrainedTrajectory,
    VersionSpan,
)
from agentrl.domain.tokens import TokenIds
from agentrl.store import Database, heartbeats
from agentrl.store.calls import call_intents, call_outcomes
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts, session_limits
from agentrl.store.sessions.ends import sealing
from agentrl.store.training import rewards, step_resume, steps, trainer_epochs, version_states

TOOLS = [{"type": "function", "function": {"name": "calculator"}}]
LIMITS = session_limits.Limits(
    group_size=2,
    min_group_size=2,
    max_concurrent_groups=10_000,
    max_staleness=1000,
    groups_per_step=2,
    turn_discount=0.9,
    reward_timeout_s=0.0,
    end_grace_s=30.0,
    session_timeout_s=900.0,
    session_max_s=86400.0,
    heartbeat_timeout_s=60.0,
)
CONFIG = {
    "name": "test",
    "model": "tiny",
    "agent": "a:b",
    "tasks": "a:c",
    "rollout": {"turn_discount": 0.9},
    "trainer": {"max_staleness": 1},
}


class History:
    """Drives one run of a store. `batches` keeps what each surviving step was given, by step. With `likeliest`, calls
    record so many tokens at each place of their output.
    """

    def __init__(
        self, db: Database, *, name: str = "test", seed: int = 0, base_model: str = "tiny", likeliest: int = 0
    ) -> None:
        self.scales: dict[str, Scale] = {}
        self.db, self.random, self.likeliest = db, random.Random(seed), likeliest
        self.step, self.version, self.batches = 0, 0, dict[int, Batch]()
        tasks = [{"n": i} for i in range(5)]
        with db.write() as conn:
            self.run_id = create_run(
                conn,
                name=name,
                config=CONFIG,
                task_data=tasks,
                base_model=base_model,
                key=f"run-key-{name}",
                steps=1000,
            )
            self.epoch = trainer_epochs.begin_epoch(conn, self.run_id)

    def call(self, conn, session_id, *, parent=None, prompt=(), role="main", tools=None, versions=None):
        """One recorded call; returns (id, its whole sequence). `prompt` is the parent's whole sequence."""
        pick = self.random
        delta = [pick.randrange(3, 200) for _ in range(pick.randint(1, 6))]
        output = [pick.randrange(3, 200) for _ in range(pick.randint(3, 8))]
        versions = versions or [self.version]
        borders = [len(output) * i // len(versions) for i in range(len(versions) + 1)]
        spans = [
            VersionSpan(version=v, start=a, end=b) for v, a, b in zip(versions, borders[:-1], borders[1:], strict=True)
        ]
        ids = [*prompt, *delta]
        call_id = codec.new_id()
        intent = call_intents.Intent(
            id=call_id,
            run_id=self.run_id,
            session_id=session_id,
            parent_id=parent,
            dialect="openai.chat",
            role=role,
            digest="d",
            replica="r",
            params={"max_tokens": 8},
            temperature=0.7,
            tools=codec.Content.of(tools) if tools else None,
            fork_reason=None,
            bridged=parent is not None,
            distribution_modified=False,
            trainable=True,
            prompt_tokens=len(ids),
            prompt_digest=TokenIds(ids).digest,
            created_at=time.time(),
        )
        call_intents.begin(conn, intent)
        outcome = call_outcomes.Outcome(
            status=InteractionStatus.COMPLETE,
            conversation_key=call_id.encode(),
            new_messages=[{"role": "user", "content": f"say {delta}"}],
            answer={"role": "assistant", "content": f"{output}"},
            prompt_delta_ids=delta,
            output_ids=output,
            logprobs=[-pick.random() for _ in output],
            spans=spans,
            finish_reason="stop",
            engine_url="e",
            cached_tokens=0,
            first_token_at=None,
            top_logprobs=[[(-0.5 - k, one + k) for k in range(self.likeliest)] for one in output]
            if self.likeliest
            else None,
        )
        call_outcomes.finish(conn, call_id, session_id, outcome)
        return call_id, ids + output

    def play(self, conn, session_id, *, versions=None, reward=True, tools=None):
        """Some turns, perhaps with a fork and a side call, and a reward."""
        root, ids = self.call(conn, session_id, versions=versions, tools=tools)
        parent, sequence = root, ids
        for _ in range(self.random.randint(0, 2)):
            parent, sequence = self.call(conn, session_id, parent=parent, prompt=sequence, versions=versions)
        if self.random.random() < 0.3:
            self.call(conn, session_id, parent=root, prompt=ids, versions=versions)
        if self.random.random() < 0.3:
            self.call(conn, session_id, role="side", versions=versions)
        if reward:
            rewards.add(conn, session_id, value=self.random.random(), discount=0.9)
            rewards.add(conn, session_id, value=self.random.random(), discount=0.9, interaction_id=parent, name="turn")
        return root

    def group(self, *, versions=None, reward=True, status=SessionStatus.COMPLETED, tools=None) -> group_starts.NewGroup:
        """A finished group of two."""
        with self.db.write() as conn:
            new = group_starts.start_group(conn, self.run_id, LIMITS, [codec.new_id() for _ in range(2)])
            for session_id in new.session_ids:
                self.play(conn, session_id, versions=versions, reward=reward, tools=tools)
                sealing.end(conn, session_id, status, None, LIMITS)
        return new

    def rejected(self, **kwargs) -> group_starts.NewGroup:
        """A group that will never be trained."""
        return self.group(status=SessionStatus.FAILED, **kwargs)

    def evaluation(self, metadata=None, **kwargs) -> group_starts.NewGroup:
        """An evaluation episode."""
        with self.db.write() as conn:
            new = group_starts.start_evaluation(
                conn, self.run_id, LIMITS, [codec.new_id()], {"q": 1}, metadata or {}, None
            )
            self.play(conn, new.session_ids[0], **kwargs)
            sealing.end(conn, new.session_ids[0], SessionStatus.COMPLETED, None, LIMITS)
        return new

    def lease(self, max_staleness: int = 1) -> Batch | None:
        """The next step's batch."""
        with self.db.write() as conn:
            step_id = steps.lease(
                conn,
                self.run_id,
                self.epoch,
                step=self.step + 1,
                n_groups=2,
                max_staleness=max_staleness,
                discount=0.9,
                scales=self.scales,
            )
            return None if step_id is None else steps.batch(conn, step_id)

    def complete(self, batch: Batch, *, publish: bool = True) -> None:
        """Train what `lease` gave."""
        trained = []
        for t in batch.trajectories:
            ages = [batch.ages[version] for version in t.versions[t.loss_mask].tolist()]
            if ages:
                advantage = self.random.gauss(0, 1)
                mean = sum(ages) / len(ages)
                trained.append(
                    TrainedTrajectory(
                        trajectory_id=t.trajectory_id,
                        advantage=advantage,
                        staleness_max=max(ages),
                        staleness_mean=mean,
                        tokens_trained=len(ages),
                    )
                )
        facts = TrainedBatch(
            step_id=batch.step_id,
            digest=batch.digest(),
            estimator="grpo",
            wasted_tokens=batch.wasted_tokens,
            trained=trained,
        )
        with self.db.write() as conn:
            version = version_states.next_version(conn, self.run_id)
            steps.complete(
                conn, self.run_id, self.epoch, facts, metrics={"loss": 0.1}, version=version, path="p", checksum="c"
            )
            if publish:
                version_states.mark_published(conn, self.run_id, version)
        self.step, self.version = batch.step, version
        self.batches[batch.step] = batch

    def train(self, n: int = 1) -> None:
        """Whole steps: two groups, lease, complete, publish."""
        for _ in range(n):
            while (batch := self.lease()) is None:
                self.group()
            self.complete(batch)

    def go_back(self, step: int) -> None:
        """A new trainer whose checkpoint is of `step`: later steps are rolled back."""
        with self.db.write() as conn:
            self.epoch = trainer_epochs.begin_epoch(conn, self.run_id)
            anchor = self.batches[step].step_id if step else None
            plan = step_resume.reconcile(conn, self.run_id, self.epoch, anchor)
            if plan.republish is not None:
                version_states.mark_published(conn, self.run_id, plan.republish, self.epoch)
        self.step, self.version = step, plan.version
        self.batches = {n: batch for n, batch in self.batches.items() if n <= step}

    def beat(self, name: str) -> None:
        """A worker is heard of."""
        with self.db.write() as conn:
            heartbeats.beat(conn, self.run_id, "worker", name)


def made_up_facts(batch: Batch, seed: int = 0) -> dict[str, TokenFacts]:
    """Random facts of every token of a batch that a trainer measures."""
    rng = np.random.default_rng(seed)
    return {
        t.trajectory_id: TokenFacts(
            rng.random((len(FACTS), int(t.loss_mask.sum())), np.float32),
            rng.random((len(MASKED_FACTS), int(t.masked_outputs.sum())), np.float32),
        )
        for t in batch.trajectories
    }
