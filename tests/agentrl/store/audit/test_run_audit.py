"""The audit finds nothing in a healthy run, and names the row of each violation."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from databases import Databases
from history import made_up_facts
from play import begin, begin_call, call, finish, group, open_group, outcome, take
from run_records import create_run
from sqlalchemy import make_url, text
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.domain.schemas import InteractionStatus, SessionStatus
from agentrl.store import Database, runs
from agentrl.store.audit import run_audit
from agentrl.store.calls import call_outcomes, call_traces, running_calls
from agentrl.store.db import codec
from agentrl.store.sessions import child_sessions, group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.training import rewards, step_resume, token_facts

LIMITS = Limits(
    group_size=2,
    min_group_size=2,
    max_concurrent_groups=100,
    max_staleness=4,
    groups_per_step=2,
    turn_discount=0.5,
    reward_timeout_s=0.0,
    end_grace_s=30.0,
    session_timeout_s=900.0,
    session_max_s=86400.0,
    heartbeat_timeout_s=60.0,
)


class Healthy:
    """A run with a row of every kind; the names of some of them are what the statements below refer to."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.garbage, self.infinite = b"garbage", math.inf
        self.high, self.nan = (codec.pack_logprobs([-0.5, value]) for value in (0.5, math.nan))
        with db.write() as conn:
            self.run = create_run(
                conn, config={"rollout": {"turn_discount": 0.5}}, task_data=[{"n": 1}], key="key", steps=10
            )
        epoch = begin(db, self.run)
        for step in (1, 2):  # 2 is rolled back and trained again: versions 2 and 3
            for _ in range(2):
                new = group(db, self.run, LIMITS, version=step - 1)
                self.trained_group, (self.session, self.other_session) = new.group_id, new.session_ids
            batch = take(db, self.run, epoch, step, discount=0.5)
            finish(db, self.run, epoch, batch)
            if step == 1:
                anchor = batch.step_id
        epoch = begin(db, self.run)
        with db.write() as conn:
            step_resume.reconcile(conn, self.run, epoch, anchor)
        batch = take(db, self.run, epoch, 2, discount=0.5)
        finish(db, self.run, epoch, batch)
        self.first_step, self.step = anchor, batch.step_id
        self.trajectory = batch.trajectories[-1].trajectory_id
        db.transact(token_facts.record, self.run, epoch, self.step, made_up_facts(batch))
        self._lease(epoch)
        self._fork()
        self._open_group()
        self._evaluation()
        self._rejected()
        with db.read() as conn:
            calls = call_traces.of_session(conn, self.session)
            self.root, self.leaf = (row.id for row in sorted(calls, key=lambda row: row.seq))
            self.path = conn.execute(
                text("SELECT id FROM trajectories WHERE session_id = :session"), {"session": self.session}
            ).scalar_one()
            self.reward = rewards.history(conn, self.session)[0]["id"]
            self.rolled_back_step = conn.execute(text("SELECT id FROM steps WHERE state = 'rolled_back'")).scalar_one()

    def _fork(self) -> None:
        """A ready group: a fork, a tool list, a side call with a value, an aborted call, a lost one."""
        new = open_group(self.db, self.run, LIMITS)
        self.ready_group = new.group_id
        with self.db.write() as conn:
            for session_id in new.session_ids:
                root = begin_call(conn, self.run, session_id, tools=[{"name": "f"}])
                call_outcomes.finish(conn, root, session_id, outcome(version=3))
                self.fork = [call(conn, self.run, session_id, parent=root, delta=(n,)) for n in (5, 6)]
                self.side = call(conn, self.run, session_id, role="side")
                aborted = begin_call(conn, self.run, session_id)
                call_outcomes.finish(conn, aborted, session_id, outcome(status=InteractionStatus.ABORTED))
                self.lost = begin_call(conn, self.run, session_id, replica="dead")
                rewards.add(conn, session_id, value=1.0, discount=0.5)
                rewards.add(conn, session_id, value=0.5, discount=0.5, interaction_id=self.side)
                rewards.add(conn, session_id, value=0.2, discount=0.5, interaction_id=self.fork[1], scope="branch")
            running_calls.declare_lost(conn, self.run, "dead")
            for session_id in new.session_ids:
                sealing.end(conn, session_id, SessionStatus.COMPLETED, None, LIMITS)
        self.forked_session, self.tools = new.session_ids[1], codec.content_hash(codec.pack_json([{"name": "f"}]))

    def _lease(self, epoch: int) -> None:
        """A started step; a group that was too old for it, and a trajectory of its own that is."""
        self.stale_group = group(self.db, self.run, LIMITS, version=0).group_id
        new = open_group(self.db, self.run, LIMITS)
        self.leased_group = new.group_id
        with self.db.write() as conn:
            for session_id in new.session_ids:
                call(conn, self.run, session_id, version=3)
                call(conn, self.run, session_id, version=0)
                rewards.add(conn, session_id, value=1.0, discount=0.5)
                sealing.end(conn, session_id, SessionStatus.COMPLETED, None, LIMITS)
        group(self.db, self.run, LIMITS, version=3)
        batch = take(self.db, self.run, epoch, 3, discount=0.5)
        self.started_step = batch.step_id
        mine = [t for t in batch.trajectories if t.session_id == session_id]
        (self.leased,) = (t.trajectory_id for t in mine if t.loss_mask.any())
        (self.too_old,) = (t.trajectory_id for t in mine if not t.loss_mask.any())

    def _open_group(self) -> None:
        """A group that still runs: open sessions, one with a sub-agent's and a running call."""
        new = open_group(self.db, self.run, LIMITS)
        self.running_group, (self.parent, self.open_session) = new.group_id, new.session_ids
        with self.db.write() as conn:
            (self.child,) = child_sessions.start_child(conn, self.parent, LIMITS, "child", {}).session_ids
            self.child_call = call(conn, self.run, self.child)
            self.running_call = begin_call(conn, self.run, self.parent)

    def _evaluation(self) -> None:
        with self.db.write() as conn:
            ended = group_starts.start_evaluation(conn, self.run, LIMITS, ["e"], {"n": 1}, {}, None)
            self.evaluation, (self.eval_session,) = ended.group_id, ended.session_ids
            self.eval_call = call(conn, self.run, self.eval_session, trainable=False)
            rewards.add(conn, self.eval_session, value=1.0, discount=0.5)
            sealing.end(conn, self.eval_session, SessionStatus.COMPLETED, None, LIMITS)

    def _rejected(self) -> None:
        """A group with too few good sessions."""
        new = open_group(self.db, self.run, LIMITS)
        self.rejected_group, (good, self.failed_session) = new.group_id, new.session_ids
        with self.db.write() as conn:
            call(conn, self.run, good)
            rewards.add(conn, good, value=1.0, discount=0.5)
            sealing.end(conn, good, SessionStatus.COMPLETED, None, LIMITS)
            sealing.end(conn, self.failed_session, SessionStatus.FAILED, "boom", LIMITS)


@pytest.fixture(scope="module", params=("sqlite", "postgresql"))
def healthy(request: pytest.FixtureRequest, databases: Databases) -> Iterator[Healthy]:
    """One run on each database; every test below rolls back what it breaks."""
    with databases.lent(request.param) as url:
        db = Database(url)
        yield Healthy(db)
        db.close()


def broken_by(healthy: Healthy, *statements: str) -> list[str]:
    """The violations after some statements, which name rows of the healthy run as `:name`."""
    with healthy.db.connect(writing=True) as conn, conn.begin() as undone:
        if healthy.db.is_sqlite:
            conn.execute(text("PRAGMA defer_foreign_keys = ON"))
        for statement in statements:
            names = set(re.findall(r":(\w+)", statement))
            conn.execute(text(statement), {name: getattr(healthy, name) for name in names})
        found = list(run_audit.scan(conn, healthy.run))
        undone.rollback()
    return found


def test_a_healthy_run_has_no_violation(healthy: Healthy) -> None:
    with healthy.db.read() as conn:
        assert list(run_audit.scan(conn, healthy.run)) == []
        assert run_audit.figures(conn, healthy.run)["calls_by_status"]["lost"] == 2
        states = runs.state_counts(conn, healthy.run)["trajectories"]
    assert set(states) == {"ready", "leased", "trained", "stale", "rejected"}


CASES: dict[str, dict[str, list[str]]] = yaml.safe_load(Path(__file__).with_name("violations.yaml").read_text())


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("name", CASES)
def test_the_audit_names_each_violation_and_no_other(healthy: Healthy, name: str) -> None:
    case = CASES[name]
    found = broken_by(healthy, *case["sql"])
    wanted = [
        re.sub(r":(\w+)", lambda match: str(getattr(healthy, match[1], match[0])), line) for line in case["lines"]
    ]
    patterns = [re.escape(line).replace(r"\*", "[0-9a-f]{32}") for line in wanted]
    assert len(found) == len(patterns), found
    for line, pattern in zip(found, patterns, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)


def test_small_pages_find_the_same_violations(healthy: Healthy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_audit, "PAGE_GROUPS", 1)
    monkeypatch.setattr(run_audit, "REMEMBERED_CONTENTS", 0)
    seen: list[tuple[int, int]] = []
    with healthy.db.read() as conn:
        assert list(run_audit.scan(conn, healthy.run, lambda done, total: seen.append((done, total)))) == []
    assert seen == [(n + 1, 11) for n in range(11)]
    assert broken_by(healthy, "UPDATE contents SET body = :high WHERE hash = :tools") == [
        f"contents {healthy.tools}: its body has another hash"
    ]


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("named", [True, False])
def test_the_command_checks_one_run_or_all_and_says_so_by_its_status(
    databases: Databases, database_kind: str, named: bool
) -> None:
    argv = ["store", "check", *(["--run", "test"] if named else [])]
    with databases.lent(database_kind) as url:
        db = Database(url)
        healthy = Healthy(db)
        good = CliRunner().invoke(app, [*argv, "--database-url", url])
        with db.write() as conn:
            conn.execute(text("UPDATE runs SET admitted = 7 WHERE id = :run"), {"run": healthy.run})
        bad = CliRunner().invoke(app, [*argv, "--database-url", url])
        db.close()
    assert (good.exit_code, good.stderr) == (0, "")
    figures = json.loads(good.stdout.rsplit("\n0 violations", 1)[0])
    assert (figures if named else figures["test"])["bridged"] > 0
    assert bad.exit_code == 1
    assert f"runs {healthy.run}: counter admitted is 7, its groups say 10" in bad.stderr.splitlines()
    assert bad.stdout.endswith("1 violations\n")


def test_the_command_finds_rows_that_refer_to_nothing(databases: Databases) -> None:
    with databases.lent("sqlite") as url:
        db = Database(url)
        Healthy(db)
        db.close()
        raw = sqlite3.connect(str(make_url(url).database))
        raw.execute("UPDATE interactions SET tools_hash = 'gone' WHERE tools_hash IS NOT NULL")
        raw.commit()
        raw.close()
        result = CliRunner().invoke(app, ["store", "check", "--database-url", url])
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert "contents gone: it is missing" in lines
    assert any(line.startswith("database: interactions, row ") and "contents is missing" in line for line in lines)
