"""Calls of the property test: they begin, finish, fail, or are lost with their replica."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule
from play import begin_call, outcome

from agentrl.domain.schemas import InteractionStatus, VersionSpan
from agentrl.store.calls import call_outcomes, running_calls

from .machine import Machine, error_code, picks
from .records import Call, Session

spans_of = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), min_size=1, max_size=2)


class CallRules(Machine):
    def _play_a_call(self, session: Session, above: Call | None, back: int, role: str = "main") -> Call:
        self._call(session, above, role, "r", [1, 2])
        self._commit(session.calls[-1], "complete", [(back, 2)])
        return session.calls[-1]

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
            assert (error_code(call_id), session.status != "open") == ("session_sealed", True)
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
