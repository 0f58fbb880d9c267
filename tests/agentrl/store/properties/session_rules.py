"""Sessions of the property test: groups start, sessions start children, and end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from agentrl.domain.schemas import SessionStatus
from agentrl.store.db import codec
from agentrl.store.sessions import child_sessions, group_starts, named_groups
from agentrl.store.sessions.ends import sealing
from agentrl.store.sessions.group_starts import NewGroup

from .machine import Machine, error_code, picks
from .records import Group, Session


class SessionRules(Machine):
    def _start(self, start: Callable[..., NewGroup], group: Group, *args: Any, counted: bool = True) -> None:
        has_place = not counted or self.model.has_capacity()
        earlier = next((g for g in self.model.groups if group.digest is not None and g.digest == group.digest), None)
        new = self._try(lambda conn: start(conn, self.run_id, self.model.limits, *args, start_digest=group.digest))
        if isinstance(new, Exception):
            assert (error_code(new), has_place, earlier) == ("no_capacity", False, None)
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

    @rule(fresh=st.booleans(), size=st.integers(1, 3))
    def start_in_group(self, fresh, size):
        """A session of a new named group, or of the newest one."""
        named = [g for g in self.model.groups if g.name is not None]
        group = named[-1] if named and not fresh else Group("", False, size, name=codec.new_id())
        refusal = self.model.refuses_start(group)
        asked = {"key_hash": codec.new_id(), "name": group.name, "size": group.size, "task": {"n": 1}, "metadata": {}}
        new = self._try(lambda conn: named_groups.start_in_group(conn, self.run_id, self.model.limits, **asked))
        if isinstance(new, Exception):
            assert error_code(new) == refusal
            return
        assert refusal is None
        if not group.id:
            group.id = new.group_id
            self.model.start(group, new.session_ids)
        else:
            assert (new.group_id, new.first_index) == (group.id, len(group.roots))
            now = self.model.now
            group.sessions.append(Session(new.session_ids[0], group, None, now, now))

    @precondition(lambda self: self.model.sessions)
    @rule(pick=picks)
    def start_child(self, pick):
        parent = self._session(pick)
        new = self._try(lambda conn: child_sessions.start_child(conn, parent.id, self.model.limits, codec.new_id(), {}))
        refusal = self.model.refuses_child(parent)
        if isinstance(new, Exception):
            assert error_code(new) == refusal
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
