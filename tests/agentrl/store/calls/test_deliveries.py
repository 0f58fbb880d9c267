"""The answer that a retry gets: random tries, losses and retries, compared with a model of the client."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from play import OUTPUT, outcome
from run_records import create_run
from sqlalchemy import select, update
from thoroughness import examples

from agentrl.domain.schemas import Delivery, InteractionStatus
from agentrl.domain.tokens import TokenIds
from agentrl.store import Database, events
from agentrl.store.calls import call_intents, call_outcomes, deliveries, running_calls
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import interactions as interactions_table

LIMITS = Limits(
    group_size=1,
    min_group_size=1,
    max_concurrent_groups=10**6,
    max_staleness=10**6,
    groups_per_step=1,
    turn_discount=1.0,
    reward_timeout_s=0.0,
    end_grace_s=30.0,
    session_timeout_s=900.0,
    session_max_s=86400.0,
    heartbeat_timeout_s=60.0,
)
picks = st.integers(0, 63)


@dataclass
class Answer:
    """The calls of one request that was sampled; `of` is the client's request whose try it was."""

    ids: list[str]
    of: int
    delivery: Delivery = Delivery.OPEN
    extended: bool = False
    got: set[int] = field(default_factory=set)  # the retry numbers that it was delivered to


class Retries(RuleBasedStateMachine):
    """Clients of one session send requests of one body. Each knows how often it has sent its own."""

    db: Database
    run_id: str

    @initialize(n=st.integers(1, 2))
    def begin(self, n):
        self.n = n
        with self.db.write() as conn:
            (self.session,) = group_starts.start_group(conn, self.run_id, LIMITS, [codec.new_id()]).session_ids
        self.tries: list[int] = []  # of each client's request: how often it was sent
        self.answers: list[Answer] = []

    @rule()
    def first_try(self):
        """A request without a mark is always a call of its own."""
        self.tries.append(0)
        self.answers.append(self._sample(len(self.tries) - 1))

    @precondition(lambda self: len(self.tries) < 6)
    @rule(recorded=st.booleans())
    def first_try_fails(self, recorded):
        """It is refused before it is a call, or it fails as one."""
        self.tries.append(0)
        if recorded:
            failed = self._begin(0)
            with self.db.write() as conn:
                for call_id in failed:
                    running_calls.fail(conn, call_id, InteractionStatus.FAILED, "broken")
        else:
            refusal = {"session_id": self.session, "digest": "d", "retry": 0}
            with self.db.write() as conn:
                events.record(conn, self.run_id, events.REFUSED, refusal, "r")

    @precondition(lambda self: any(a.delivery == Delivery.OPEN for a in self.answers))
    @rule(pick=picks, how=st.sampled_from([Delivery.GIVEN, Delivery.GIVEN, Delivery.FREE, Delivery.UNSURE]))
    def answer_ends(self, pick, how):
        waiting = [a for a in self.answers if a.delivery == Delivery.OPEN]
        answer = waiting[pick % len(waiting)]
        answer.delivery = how
        with self.db.write() as conn:
            if how == Delivery.GIVEN:
                deliveries.mark_delivered(conn, answer.ids)
            elif how == Delivery.FREE:
                deliveries.release(conn, answer.ids, "r")
            else:
                mine = interactions_table.c.id.in_(answer.ids)
                conn.execute(update(interactions_table).where(mine).values(delivery=how, holder=None))

    @precondition(lambda self: any(a.delivery == Delivery.GIVEN for a in self.answers))
    @rule(pick=picks, choice=picks)
    def go_on(self, pick, choice):
        known = [a for a in self.answers if a.delivery == Delivery.GIVEN]
        answer = known[pick % len(known)]
        answer.extended = True
        self._begin(0, parent=answer.ids[choice % len(answer.ids)], digest="another")

    @precondition(lambda self: self.tries)
    @rule(pick=picks)
    def retry(self, pick):
        request = pick % len(self.tries)
        self.tries[request] += 1
        number = self.tries[request]
        expected = self._expected(number)
        with self.db.write() as conn:
            claim = deliveries.claim(conn, self.session, "d", number, "r")
        if expected is None:
            assert claim.ids == []
            assert claim.held == any(a.delivery == Delivery.OPEN for a in self.answers)
            self.answers.append(self._sample(request, number))
            return
        assert claim.ids == expected.ids
        expected.got.add(number)
        if expected.delivery != Delivery.GIVEN:
            expected.delivery = Delivery.OPEN
        else:  # a client that received an answer gets nobody else's
            assert expected.of == request
        expected.of = request

    def _expected(self, number: int) -> Answer | None:
        """The oldest answer that nobody received; else the only one, where the retry can be of no other request."""
        lost = [a for a in self.answers if a.delivery in (Delivery.FREE, Delivery.UNSURE)]
        if lost:
            return lost[0]
        if len(self.answers) != 1 or self.answers[0].delivery == Delivery.OPEN or len(self.tries) > 1:
            return None
        (only,) = self.answers
        return None if only.extended or max(only.got, default=0) >= number else only

    def _sample(self, request: int, number: int = 0) -> Answer:
        ids = self._begin(number)
        with self.db.write() as conn:
            for call_id in ids:
                call_outcomes.finish(conn, call_id, self.session, outcome(output=OUTPUT))
        return Answer(ids=ids, of=request, got={number} if number else set())

    def _begin(self, number: int, parent: str | None = None, digest: str = "d") -> list[str]:
        ids = [codec.new_id() for _ in range(self.n)]
        tokens = TokenIds([1, 2])
        options: dict[str, Any] = {"choice": 0} | ({"retry": number} if number else {})
        with self.db.write() as conn:
            for choice, call_id in enumerate(ids):
                call_intents.begin(
                    conn,
                    call_intents.Intent(
                        id=call_id,
                        run_id=self.run_id,
                        session_id=self.session,
                        parent_id=parent,
                        dialect="openai.chat",
                        role="main",
                        digest=digest,
                        replica="r",
                        params={},
                        temperature=1.0,
                        tools=None,
                        fork_reason=None,
                        bridged=False,
                        distribution_modified=False,
                        trainable=True,
                        prompt_tokens=2,
                        prompt_digest=tokens.digest,
                        created_at=time.time(),
                        options=options | {"choice": choice},
                        request_id=ids[0] if self.n > 1 else None,
                    ),
                )
        return ids

    def teardown(self):
        if self.answers:
            with self.db.read() as conn:
                rows = conn.execute(
                    select(interactions_table.c.id, interactions_table.c.delivery).where(
                        interactions_table.c.id.in_([call_id for a in self.answers for call_id in a.ids])
                    )
                )
                found = {row.id: row.delivery for row in rows}
            assert found == {call_id: a.delivery for a in self.answers for call_id in a.ids}


@pytest.mark.long_on("postgresql")
@pytest.mark.searches
def test_retries_get_the_answer_that_a_model_of_clients_predicts(fast_db: Database) -> None:
    with fast_db.write() as conn:
        run_id = create_run(conn, task_data=[{"n": 0}], key="k", steps=10**6)
    machine = type("Machine", (Retries,), {"db": fast_db, "run_id": run_id})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(20),
            stateful_step_count=12,
            suppress_health_check=list(HealthCheck),
        ),
    )
