"""What follows from the facts of a model of the store: returns, paths of calls, trajectories and their ages."""

from __future__ import annotations

from agentrl.store.sessions.session_limits import Limits

from .records import Call, Group, Path, Session, Step


class Facts:
    """The facts of a run, and what follows from them."""

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
