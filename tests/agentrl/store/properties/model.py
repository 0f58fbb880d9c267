"""A model of the store in Python objects, which the property test compares with the real store.

Nothing that follows from something else is kept: the state of a trajectory, its return and its tokens are worked out
from its group's state, its calls and the applied rewards whenever they are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.store.sessions.session_limits import Limits

FAILED = ("failed", "abandoned")


@dataclass(eq=False)
class Call:
    id: str
    session: Session
    parent: Call | None
    role: str
    replica: str
    trainable: bool
    prompt: list[int]
    delta: list[int]
    status: str = "running"
    seq: int | None = None
    output: list[int] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(eq=False)
class Reward:
    call: Call | None
    scope: str
    name: str
    value: float
    applied: bool
    key: str | None
    id: str


@dataclass(eq=False)
class Session:
    id: str
    group: Group
    parent: Session | None
    created: float
    seen: float
    status: str = "open"
    ended: float | None = None
    built: bool = False
    seq: int = 0
    calls: list[Call] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)

    @property
    def children(self) -> list[Session]:
        return [s for s in self.group.sessions if s.parent is self]

    @property
    def open_family(self) -> list[Session]:
        """It and the open sessions below it."""
        return [self, *(s for child in self.children if child.status == "open" for s in child.open_family)]

    @property
    def below_gone(self) -> bool:
        """A session above it failed: then it is not trained either."""
        return self.parent is not None and (self.parent.status in FAILED or self.parent.below_gone)

    @property
    def root(self) -> Session:
        return self.parent.root if self.parent is not None else self

    @property
    def depth(self) -> int:
        return self.parent.depth + 1 if self.parent is not None else 0

    @property
    def complete(self) -> list[Call]:
        return sorted((c for c in self.calls if c.status == "complete"), key=lambda c: c.seq or 0)

    @property
    def running(self) -> bool:
        return any(c.status == "running" for c in self.calls)

    @property
    def rewarded(self) -> bool:
        return any(r.applied for r in self.rewards) or (self.parent is not None and self.parent.rewarded)


@dataclass(eq=False)
class Group:
    id: str
    is_eval: bool
    size: int
    owner: str | None = None
    digest: str | None = None
    name: str | None = None  # by which sessions join it
    missing: int = 0  # places that were given up
    state: str = "running"
    sessions: list[Session] = field(default_factory=list)
    step: Step | None = None
    too_old: set[str] = field(default_factory=set)  # leaves of the trajectories that its step found too old
    reject_reason: str = "group_too_small"

    @property
    def roots(self) -> list[Session]:
        return [s for s in self.sessions if s.parent is None]

    @property
    def waits(self) -> bool:
        """Whether sessions may still join it."""
        return len(self.roots) + self.missing < self.size


@dataclass(eq=False)
class Step:
    id: str
    number: int
    epoch: int
    before: int
    groups: list[Group]
    state: str = "started"
    after: int | None = None


@dataclass(frozen=True)
class Path:
    """What a trajectory must be: state, reason, return, trainable tokens and the versions of those."""

    state: str
    reason: str | None
    value: float
    tokens: int
    versions: tuple[int | None, int | None]
    step: str | None


class Model:
    def __init__(self, limits: Limits, *, target_steps: int, policy: str, now: float) -> None:
        self.limits = limits
        self.target_steps = target_steps
        self.policy = policy
        self.now = now
        self.heard_since = now
        self.beats: dict[str, float] = {}
        self.groups: list[Group] = []
        self.steps: list[Step] = []
        self.parents: dict[int, int | None] = {0: None}
        self.version_states = {0: "published"}
        self.returned = self.cursor = self.epoch = 0
        self.published_step = self.current_version = 0

    # what follows from the facts

    @property
    def sessions(self) -> list[Session]:
        return [s for g in self.groups for s in g.sessions]

    @property
    def calls(self) -> list[Call]:
        return [c for s in self.sessions for c in s.calls]

    @property
    def training(self) -> list[Group]:
        return [g for g in self.groups if not g.is_eval]

    @property
    def running_groups(self) -> int:
        return sum(g.state == "running" for g in self.training)

    @property
    def surviving(self) -> list[Step]:
        return [s for s in self.steps if s.state != "rolled_back"]

    def has_capacity(self) -> bool:
        kept = len(self.training) - self.returned
        bound = min(self.limits.max_staleness + self.published_step + 1, self.target_steps)
        return kept < bound * self.limits.groups_per_step and self.running_groups < self.limits.max_concurrent_groups

    def chain(self, version: int) -> list[int]:
        chain = [version]
        while (above := self.parents[chain[-1]]) is not None:
            chain.append(above)
        return chain

    def age(self, version: int, before: int) -> int:
        """Updates on the way to `before` that came after it parted from the way to `version`."""
        mine = set(self.chain(version))
        return next(i for i, v in enumerate(self.chain(before)) if v in mine)

    def returns(self, session: Session) -> dict[str, float]:
        """R of each call with value, by the sums that the recursion stands for."""
        gamma = self.limits.turn_discount
        newest = {(r.call, r.scope, r.name): r.value for r in session.rewards if r.applied}
        calls = session.complete
        main = [c for c in calls if c.role == "main"]
        own: dict[Call, float] = dict.fromkeys(main, 0.0)
        if not newest and session.parent is not None and session.parent.rewarded:
            newest = {(None, "session", "inherited"): self.episode_return(session.parent)}
        result: dict[str, float] = {}
        for (call, scope, _), value in newest.items():
            if scope == "session" and main:
                own[main[-1]] += value
            elif scope == "call" and call in own:
                own[call] += value
            elif scope == "call" and call in calls:
                result[call.id] = result.get(call.id, 0.0) + value
        for i, call in enumerate(main):
            result[call.id] = sum(gamma ** (j - i) * own[later] for j, later in enumerate(main) if j >= i)
        for (call, scope, _), value in newest.items():
            if scope == "branch" and call in calls:
                distance = 0
                node: Call | None = call
                while node is not None:
                    if node.role == "main" or node is call:
                        result[node.id] = result.get(node.id, 0.0) + gamma**distance * value
                        distance += 1
                    node = node.parent
        return result

    def episode_return(self, session: Session) -> float:
        root = session.root
        first = next((c for c in root.complete if c.role == "main"), None)
        return self.returns(root)[first.id] if first is not None else 0.0

    def paths(self, session: Session) -> dict[str, tuple[list[Call], list[Call]]]:
        """Leaf → (the calls of its path, those whose output it owns), oldest leaf first."""
        calls = session.complete
        found: dict[str, tuple[list[Call], list[Call]]] = {}
        taken: set[Call] = set()
        for leaf in calls:
            if any(c.parent is leaf for c in calls):
                continue
            path: list[Call] = []
            node: Call | None = leaf
            while node is not None:
                path.insert(0, node)
                node = node.parent
            found[leaf.id] = (path, [c for c in path if c not in taken])
            taken.update(path)
        return found

    def trainable_spans(self, session: Session, leaf: str) -> list[tuple[int, int]]:
        """(version, tokens) of what a path could train."""
        valued = self.returns(session)
        owned = self.paths(session)[leaf][1]
        return [(v, b - a) for c in owned if c.trainable and c.id in valued for v, a, b in c.spans]

    def has_trajectories(self, session: Session) -> bool:
        trains = session.status == "completed" and not session.below_gone and not session.group.is_eval
        return session.built and trains

    def trajectories(self, session: Session) -> dict[str, Path]:
        if not self.has_trajectories(session):
            return {}
        group, result = session.group, {}
        for leaf in self.paths(session):
            spans = self.trainable_spans(session, leaf)
            reason = None if spans else "no_trainable_tokens"
            if spans and not session.rewarded:
                reason = "no_reward"
            state, step = ("rejected", None) if reason else ("ready", None)
            if not reason and group.state == "rejected":
                state, reason = "rejected", group.reject_reason
            elif not reason and group.state == "stale":
                state, reason = "stale", "too_old"
            elif not reason and group.step is not None:
                step = group.step.id
                state, reason = ("stale", "too_old") if leaf in group.too_old else (group.state, None)
            versions = [v for v, _ in spans]
            result[leaf] = Path(
                state,
                reason,
                self.episode_return(session),
                sum(n for _, n in spans),
                (min(versions, default=None), max(versions, default=None)),
                step,
            )
        return result

    # what happens

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
