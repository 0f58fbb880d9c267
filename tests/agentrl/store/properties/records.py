"""What a model of the store keeps: sessions with their calls and rewards, groups and steps."""

from __future__ import annotations

from dataclasses import dataclass, field

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
