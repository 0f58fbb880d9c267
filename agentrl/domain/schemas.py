"""Domain types that cross module borders. Arrays are numpy, one entry per token unless a field says otherwise."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.domain.experts.routed_experts import RoutedExperts

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
Json = dict[str, Any]

PROMPT_VERSION = -1
"""The weight version of a token that no policy sampled."""
GREEDY_BELOW = 1e-6
"""SGLang takes the likeliest token at a temperature below this one."""

UNREAD = "[image or file: not shown, this model reads text only]"
"""The text that replaces each part of a tool's result that is not text."""


class Power(StrEnum):
    """The rights of a key."""

    ADMIN = "admin"  # publish weights, make and revoke keys, and all that a run key may
    RUN = "run"  # start sessions, reward and end any of them, look at the run
    SESSION = "session"  # call the model in one session, reward it, end it


class SessionStatus(StrEnum):
    """Life of a session: open → closing → completed | failed | abandoned."""

    OPEN = "open"
    CLOSING = "closing"  # ended by its agent; calls that still run may commit
    COMPLETED = "completed"
    FAILED = "failed"  # the agent raised or timed out
    ABANDONED = "abandoned"  # its client or worker went silent or gave it up


GONE = (SessionStatus.FAILED, SessionStatus.ABANDONED)
"""Statuses of ended sessions that are never trained."""
ENDED = (SessionStatus.COMPLETED, *GONE)
"""Statuses of ended sessions."""


class InteractionStatus(StrEnum):
    """Life of a model call: running → complete | aborted | lost | failed."""

    RUNNING = "running"  # the intent row
    COMPLETE = "complete"
    ABORTED = "aborted"  # stopped before its end: the tokens so far are kept
    LOST = "lost"  # its proxy died before the commit; never trained
    FAILED = "failed"  # the engine or the recorder refused


class Delivery(StrEnum):
    """Whether a client has received the answer to a model call."""

    OPEN = "open"  # a client waits, or the proxy died before it recorded the end of the wait
    GIVEN = "given"  # a client has received the end
    FREE = "free"  # the client left before the end: a retry may claim the answer
    UNSURE = "unsure"  # the proxy died at the end of the answer: a retry may claim it, else it counts as given


class TrajectoryState(StrEnum):
    """The state of a trajectory."""

    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    STALE = "stale"
    REJECTED = "rejected"


class RewardScope(StrEnum):
    """The scope of a reward: the calls whose returns it changes (credit.call_returns)."""

    SESSION = "session"  # the whole episode
    BRANCH = "branch"  # the path that leads to a call
    CALL = "call"  # a call, and by discount the main calls before it


class VersionState(StrEnum):
    """Life of a weight version: pending → published; rolled back when its step did not survive."""

    PENDING = "pending"
    PUBLISHED = "published"
    ROLLED_BACK = "rolled_back"


class StepState(StrEnum):
    """Life of an optimizer step: started → trained → published; or rolled back."""

    STARTED = "started"
    TRAINED = "trained"
    PUBLISHED = "published"
    ROLLED_BACK = "rolled_back"


TRAINED = (StepState.TRAINED, StepState.PUBLISHED)
"""States of steps that were trained and survive."""


class Role(StrEnum):
    """The role of a model call in its session."""

    MAIN = "main"  # a turn of the agent itself: carries the session's reward
    SUBAGENT = "subagent"  # a turn of another agent inside the session: shares the session's outcome
    SIDE = "side"  # a title, a summary, a check: carries no value unless rewarded itself
    UPSTREAM = "upstream"  # answered by another model than the policy: never trained


class ForkReason(StrEnum):
    """Why a call could not extend an earlier call's tokens."""

    HISTORY_EDITED = "history_edited"  # an earlier message differs from the one that was sent or sampled
    ARGUMENTS_CHANGED = "arguments_changed"  # an earlier tool call came back with other arguments
    CALL_IDS_CHANGED = "call_ids_changed"  # an earlier tool call came back with another id
    TEMPLATE_REWROTE = "template_rewrote"  # the chat template changes earlier turns when new ones follow
    REASONING_DROPPED = "reasoning_dropped"  # the chat template leaves the reasoning out of earlier turns
    TRUNCATED = "truncated"  # the earlier output has no end-of-turn token
    TEXT_DROPPED = "text_dropped"  # an earlier tool call came back without the text that was sampled beside it
    TOOLS_CHANGED = "tools_changed"  # same messages, other tools or template options
    COMPACTED = "compacted"  # earlier turns were left out or replaced by a summary
    SUMMARY = "summary"  # wrote the summary that a compacted conversation begins with
    OTHER_AGENT = "other_agent"  # a system prompt or tools that the session had not had before
    NEW_CONVERSATION = "new_conversation"  # begins anew, under the same system prompt and tools


STARTS = (None, ForkReason.NEW_CONVERSATION, ForkReason.OTHER_AGENT)
"""Fork reasons of calls that had no earlier call to extend: no part of their prompts was processed before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """Output tokens `[start, end)` of one interaction were sampled by weight `version`."""

    version: int
    start: int
    end: int


FACTS = (
    "logprob",  # log π of the policy, as the token's minibatch began
    "proximal_logprob",  # log π of the proximal policy, the denominator of the ratio
    "entropy",  # of the token's distribution, in nats
    "ratio",  # importance ratio ρ, at the algorithm's level
    "clipped",  # 1: the bounds of the surrogate changed the token's loss
    "weight",  # of the token's loss, from π_prox/π_behave (`correction`)
    "capped",  # 1: that quotient was out of its bounds
    "advantage",
    "kept",  # 0: left out of the policy loss (M2PO's second-moment bound, Clip-Cov)
    "teacher_logprob",  # log π of the teacher, where it is a part of the advantage
    "logprob_before",  # log π of the policy before the step, where that part is computed from it
)
"""The facts that the trainer measures for each trained token, in the order of the rows of `TokenFacts.trained`. New
ones are added at the end: stored rows hold the first ones.
"""
MASKED_FACTS = ("logprob", "entropy")
"""Those for each token of `TrajectoryTokens.masked_outputs`."""


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """Facts of one trajectory's tokens: a row for each fact, a column for each token. NaN: not computed."""

    trained: Float32  # (K, S) FACTS, of loss tokens
    masked: Float32  # (2, M) MASKED_FACTS, of masked outputs

    def __post_init__(self) -> None:
        if (len(self.trained), len(self.masked)) != (len(FACTS), len(MASKED_FACTS)):
            raise ValueError(f"one row for each fact, got {self.trained.shape} and {self.masked.shape}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryTokens:
    """One root-to-leaf path of a session, ready for the loss. All arrays share one length T.

    `loss_mask` is true for tokens that this trajectory trains: sampled by the policy, owned by this path (an output
    shared by several paths belongs to exactly one), of an unmodified distribution, and young enough.
    """

    trajectory_id: str
    session_id: str
    episode_id: str  # the root session; baselines count each episode once
    group_id: str
    input_ids: Int32  # (T,)
    loss_mask: Bool  # (T,)
    logprobs: Float32  # (T,) behaviour logprob, 0 where not sampled
    versions: Int32  # (T,) weight version, PROMPT_VERSION where not sampled
    turn_ids: Int32  # (T,) index of the interaction in the path, -1 where not sampled
    temperatures: Float32  # (T,) sampling temperature, 1 where not sampled
    turn_returns: Float64  # (n_turns,) discounted return of each interaction of the path
    episode_return: float  # the return of the episode's first main call: what group baselines use
    named_returns: Mapping[str, float] = field(default_factory=dict)  # the same from the rewards of each name alone
    calls: tuple[str, ...] = ()  # (n_turns,) ids; empty where no store has them, as the next one
    prompts: tuple[str, ...] = ()  # (n_turns,) digests of all tokens before each output
    kv_mixed_turns: frozenset[int] = frozenset()  # turns with keys and values of older weights too
    routed: RoutedExperts | None = None  # of T positions; None where no call of the path recorded any
    truncated: bool = False  # a limit ended the episode after its last token
    greedy_return: float | None = None  # of the group's greedy episode, where it has one

    def __post_init__(self) -> None:
        lengths = {
            len(a)
            for a in (self.input_ids, self.loss_mask, self.logprobs, self.versions, self.turn_ids, self.temperatures)
        } | ({len(self.routed)} if self.routed is not None else set())
        if len(lengths) != 1:
            raise ValueError(f"arrays of a trajectory must share one length, got {sorted(lengths)}")

    @property
    def length(self) -> int:
        """All tokens."""
        return len(self.input_ids)

    @property
    def computed_tokens(self) -> int:
        """Tokens before the last loss token, which a forward pass needs; 0 without loss tokens."""
        return int(np.flatnonzero(self.loss_mask)[-1]) if self.loss_mask.any() else 0

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return int((self.turn_ids >= 0).sum())

    @property
    def turn_tokens(self) -> Int32:
        """(n_turns,) loss tokens of each turn."""
        return np.bincount(self.turn_ids[self.loss_mask], minlength=len(self.turn_returns)).astype(np.int32)

    @property
    def kv_mixed(self) -> Bool:
        """(T,) whether a token was sampled over keys and values that partly older weights computed."""
        return np.isin(self.turn_ids, list(self.kv_mixed_turns))

    def digest(self) -> bytes:
        """16 bytes over every field. Equal digests mean equal trajectories."""
        digest = hashlib.blake2b(digest_size=16)
        self.feed(digest)
        returns = [(name, float(value)) for name, value in sorted(self.named_returns.items())]
        rest = (self.session_id, self.calls, self.prompts, sorted(self.kv_mixed_turns), self.truncated)
        digest.update(repr((*rest, returns, self.greedy_return)).encode())
        return digest.digest()

    def feed(self, digest: hashlib.blake2b) -> None:
        """Add the fields that digests of earlier releases cover: names, the return and every array."""
        digest.update(f"{self.trajectory_id} {self.episode_id} {self.group_id} {self.episode_return!r}".encode())
        arrays: list[npt.NDArray[Any]] = [self.input_ids, self.loss_mask, self.logprobs, self.versions, self.turn_ids]
        arrays += [self.temperatures, self.turn_returns]
        if self.routed is not None:
            arrays += [self.routed.ids, self.routed.origins]
        for array in arrays:
            digest.update(np.ascontiguousarray(array).reshape(-1).data)

    @property
    def masked_outputs(self) -> Bool:
        """(T,) whether a token was sampled and is no loss token, but a later one is: the pass that trains the later one
        predicts it, too.
        """
        before = np.zeros_like(self.loss_mask)
        before[1 : np.flatnonzero(self.loss_mask)[-1] if self.loss_mask.any() else 0] = True
        return before & (self.turn_ids >= 0) & ~self.loss_mask


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedTrajectory:
    """A trajectory that a step trained. Staleness is in versions, over the trained tokens."""

    trajectory_id: str
    advantage: float  # mean over its trained tokens
    staleness_max: int
    staleness_mean: float
    tokens_trained: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedBatch:
    """The facts of a step's batch that `store.steps.complete` records."""

    step_id: str
    digest: str  # Batch.digest of the trained batch
    estimator: str  # of the advantages
    wasted_tokens: int
    trained: list[TrainedTrajectory]


JOINED = "t"
"""The first character of a batch's digest that is made of its trajectories' digests."""


def joined_digest(trajectories: Iterable[bytes]) -> str:
    """A batch's digest, from those of its trajectories in their order: `JOINED` and 31 hex digits. Ranks that have a
    part of a batch each compute the parts of it.
    """
    return JOINED + hashlib.blake2b(b"".join(trajectories), digest_size=16).hexdigest()[:31]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A leased batch: whole groups, oldest first. `version` is the policy's version before the step."""

    step_id: str
    step: int
    version: int
    trajectories: list[TrajectoryTokens]
    ages: dict[int, int]  # weight version of a token in the batch → its age at this step (staleness.ages)
    wasted_tokens: int = 0  # sampled and trainable, but too old

    def digest(self) -> str:
        """`joined_digest` of its trajectories. Equal digests mean equal batches."""
        return joined_digest([t.digest() for t in self.trajectories])

    def serial_digest(self) -> str:
        """32 hex digits over what `feed` adds, in one hash: the digest of steps of earlier releases."""
        digest = hashlib.blake2b(digest_size=16)
        for t in self.trajectories:
            t.feed(digest)
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePlan:
    """Instructions for a starting trainer: load the checkpoint of `step` (0: base model), then go on at `step + 1`.

    `republish` names a version that is trained and durable but that the engines may not serve yet. `roll_forward` says
    that the store has not completed the checkpoint's own step: the trainer first completes it, from the facts in the
    checkpoint.
    """

    step: int
    version: int
    republish: int | None
    roll_forward: bool = False
    rolled_back_steps: list[int] = field(default_factory=list)
