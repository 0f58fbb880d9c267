"""A model of the store in Python objects, which the property test compares with the real store.

Nothing that follows from something else is kept: the state of a trajectory, its return and its tokens are worked out
from its group's state, its calls and the applied rewards whenever they are compared.
"""

from __future__ import annotations

from .facts import Facts
from .records import FAILED, Call, Group, Session, Step


class Model(Facts):
    """What happens to a run, and changes its facts."""

    def start(self, group: Group, session_ids: list[str]) -> None:
        self.groups.append(group)
        group.sessions = [Session(sid, group, None, self.now, self.now) for sid in session_ids]
        self.cursor += not group.is_eval
        if group.owner is not None:
            self.beats[group.owner] = self.now

    def refuses_child(self, parent: Session) -> str | None:
        """Why it has no sub-agent any more."""
        if parent.status != "open":
            return "session_sealed"
        if parent.depth >= self.limits.max_subagent_depth:
            return "subagents_too_deep"
        below = [s for s in parent.group.sessions if s.parent is not None and s.root is parent.root]
        return "too_many_subagents" if len(below) >= self.limits.max_subagents_per_session else None

    def commit(self, call: Call, status: str, output: list[int], spans: list[tuple[int, int, int]]) -> None:
        session = call.session
        session.seq += 1
        session.seen = self.now
        call.status, call.seq, call.output, call.spans = status, session.seq, output, spans

    def end(self, session: Session, status: str) -> None:
        given_up = status == "abandoned" and not session.built and session.status not in FAILED
        if session.status != "open" and not given_up:
            return
        for child in session.children:
            self.end(child, status)
        session.status = "closing" if status == "completed" and session.running else status
        session.ended = self.now
        self.settle(session)

    def settle(self, session: Session) -> None:
        if session.built or session.ended is None:
            return
        if session.status == "closing":
            if session.running and self.now < session.ended + self.limits.end_grace_s:
                return
            session.status = "completed"
        if session.parent is not None and not session.parent.built:
            return
        trains = session.status == "completed" and not session.below_gone and not session.group.is_eval
        waits = trains and not session.rewarded
        if waits and self.now < session.ended + self.limits.reward_timeout_s:
            return
        session.built = True
        for child in session.children:
            self.settle(child)
        self.settle_group(session.group)

    def settle_group(self, group: Group) -> None:
        if group.state != "running" or group.waits or not all(s.built for s in group.sessions):
            return
        if group.is_eval:
            group.state = "evaluated"
            return
        good = {s.root.id for s in group.sessions for path in self.trajectories(s).values() if path.state == "ready"}
        group.state = "ready" if len(good) >= self.limits.min_group_size else "rejected"
        if group.missing and group.state == "rejected":
            group.reject_reason = (
                f"rejected: {len(group.roots)} of {group.size} sessions started, {len(good)} trainable, "
                f"min_group_size is {self.limits.min_group_size}"
            )
        self.returned += group.state == "rejected"

    def refuses_start(self, group: Group) -> str | None:
        """Why it is not created, or no session joins it any more."""
        if not group.id:
            return None if self.has_capacity() else "no_capacity"
        if group.waits:
            return None
        return "group_closed" if group.missing else "group_full"

    def look_at_group(self, group: Group) -> None:
        """What a replica does with a group that is due."""
        heard = max(self.heard_since, *(at for s in group.sessions for at in (s.created, s.ended or 0.0)))
        if all(s.built for s in group.sessions) and self.now >= heard + self.limits.session_timeout_s:
            group.missing = group.size - len(group.roots)
            self.settle_group(group)

    def look(self, session: Session) -> None:
        if session.status != "open":
            return self.settle(session)
        if self.now >= session.created + self.limits.session_max_s:
            return self.end(session, "failed")
        owner = session.group.owner
        family = session.open_family
        heard = max(self.heard_since, self.beats.get(owner or "", 0.0), *(s.seen for s in family))
        patience = self.limits.heartbeat_timeout_s if owner else self.limits.session_timeout_s
        under_an_open_one = session.parent is not None and session.parent.status == "open"
        if self.now >= heard + patience and not any(s.running for s in family) and not under_an_open_one:
            self.end(session, "abandoned")
        return None

    def claim(self, before: int, n_groups: int) -> list[Group] | None:
        """The oldest groups that are young enough, or None; those before them that are too old are retired."""
        taken: list[Group] = []
        for group in sorted((g for g in self.groups if g.state == "ready"), key=lambda g: g.id):
            if len(taken) == n_groups:
                break
            old: set[str] = set()
            young = 0
            for session in group.sessions:
                for leaf, path in self.trajectories(session).items():
                    if path.state != "ready":
                        continue
                    ages = [
                        self.age(v, before) <= self.limits.max_staleness for v, _ in self.trainable_spans(session, leaf)
                    ]
                    keep = any(ages) if self.policy == "mask" else all(ages)
                    young += keep
                    if not keep:
                        old.add(leaf)
            if young:
                taken.append(group)
                group.too_old = old
            else:
                group.state = "stale"
                self.returned += 1
        return taken if len(taken) == n_groups else None

    def lease(self, step: Step) -> None:
        self.steps.append(step)
        for group in step.groups:
            group.state, group.step = "leased", step

    def complete(self, step: Step, version: int) -> None:
        assert version not in self.parents, "a version number was used twice"
        assert version > max(self.parents)
        step.state, step.after = "trained", version
        self.parents[version], self.version_states[version] = step.before, "pending"
        for group in step.groups:
            group.state = "trained"

    def publish(self, version: int) -> None:
        self.version_states[version] = "published"
        self.current_version = version
        self.published_step = 0
        for step in self.steps:
            if step.after == version:
                step.state, self.published_step = "published", step.number

    def roll_back(self, step: Step) -> None:
        step.state = "rolled_back"
        if step.after is not None:
            self.version_states[step.after] = "rolled_back"
        for group in step.groups:
            group.state, group.step, group.too_old = "ready", None, set()
