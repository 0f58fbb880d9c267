"""Outlines of trajectories: all of a trajectory but its tokens, logprobs and experts.

    outline (calls, lengths, versions, loss tokens, returns) ─┬─► plan, advantages of returns, metrics: on every rank
                                                              └─► + `PathTokens` ─► TrajectoryTokens: where it trains

An outline has some 200 bytes for each call, however long the call is. M: calls of the path. Positions count tokens of
the trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from agentrl.domain.experts.routed_experts import RoutedExperts
from agentrl.domain.schemas import PROMPT_VERSION, Bool, Float32, Float64, Int32, TrajectoryTokens


class Credited(Protocol):
    """What advantages of returns and metrics depend on: an `Outline`, or the whole `TrajectoryTokens`."""

    @property
    def trajectory_id(self) -> str:
        """Its id."""

    @property
    def episode_id(self) -> str:
        """The root session."""

    @property
    def group_id(self) -> str:
        """The group."""

    @property
    def episode_return(self) -> float:
        """The return of the episode."""

    @property
    def named_returns(self) -> Mapping[str, float]:
        """The return of the episode from the rewards of each name alone; empty where they are not known."""

    @property
    def calls(self) -> tuple[str, ...]:
        """(M,) the id of each call."""

    @property
    def prompts(self) -> tuple[str, ...]:
        """(M,) a digest of all tokens before each call's output."""

    @property
    def turn_returns(self) -> Float64:
        """(M,) the return of each call."""

    @property
    def turn_tokens(self) -> Int32:
        """(M,) loss tokens of each call."""

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""

    @property
    def computed_tokens(self) -> int:
        """Tokens before the last loss token, which a forward pass needs; 0 without loss tokens."""

    @property
    def length(self) -> int:
        """All tokens."""

    @property
    def truncated(self) -> bool:
        """Whether a limit ended the episode after its last token."""

    @property
    def greedy_return(self) -> float | None:
        """The return of the group's greedy episode; None where it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """A trajectory without its tokens. The rows of `sampled` and `trained` are (call, version, start, end), in the
    order of their positions; those of `sampled` cover the outputs.
    """

    trajectory_id: str
    session_id: str
    episode_id: str
    group_id: str
    calls: tuple[str, ...]  # M ids
    prompts: tuple[str, ...]  # M digests: equal ones mean that all tokens before the output are equal
    outputs: Int32  # (M, 2) positions [start, end) of each call's output
    temperatures: Float32  # (M,)
    kv_mixed: Bool  # (M,) sampled over keys and values that partly older weights computed
    sampled: Int32  # (S, 4)
    trained: Int32  # (K, 4) the loss tokens
    turn_returns: Float64  # (M,)
    episode_return: float
    named_returns: Mapping[str, float] = field(default_factory=dict)  # of the episode, by the name of its rewards
    wasted_tokens: int  # sampled and trainable, but too old
    truncated: bool = False  # a limit ended the episode after its last token
    greedy_return: float | None = None  # of the group's greedy episode, where it has one

    @property
    def length(self) -> int:
        """All tokens."""
        return int(self.outputs[-1, 1])

    @property
    def computed_tokens(self) -> int:
        """Tokens before the last loss token, which a forward pass needs; 0 without loss tokens."""
        return int(self.trained[-1, 3]) - 1 if len(self.trained) else 0

    @property
    def loss_tokens(self) -> int:
        """The number of loss tokens."""
        return int((self.trained[:, 3] - self.trained[:, 2]).sum())

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return int((self.outputs[:, 1] - self.outputs[:, 0]).sum())

    @property
    def turn_tokens(self) -> Int32:
        """(M,) loss tokens of each call."""
        lengths = self.trained[:, 3] - self.trained[:, 2]
        return np.bincount(self.trained[:, 0], weights=lengths, minlength=len(self.calls)).astype(np.int32)

    @property
    def starts(self) -> Int32:
        """(M,) the position at which each call's prompt begins to differ from the sequence of the call before."""
        return np.concatenate([np.zeros(1, np.int32), self.outputs[:-1, 1]])

    def shared(self, other: Outline) -> int:
        """Tokens at the beginning that are known to be equal in both: calls of both, and equal prompts."""
        at = 0
        for i in range(min(len(self.calls), len(other.calls))):
            if self.prompts[i] != other.prompts[i]:
                return at
            at = int(self.outputs[i, 0])
            if self.calls[i] != other.calls[i]:
                return at
            at = int(self.outputs[i, 1])
        return at


@dataclass(frozen=True, slots=True)
class PathTokens:
    """The tokens of a path of calls. They never change once its session has ended."""

    input_ids: Int32  # (T,)
    logprobs: Float32  # (T,) 0 where not sampled
    outputs: Int32  # (M, 2) positions [start, end) of each call's output
    routed: RoutedExperts | None = None  # of T positions

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays."""
        experts = 0 if self.routed is None else self.routed.ids.nbytes + self.routed.origins.nbytes
        return self.input_ids.nbytes + self.logprobs.nbytes + experts


def joined(outline: Outline, tokens: PathTokens) -> TrajectoryTokens:
    """The trajectory. Raises ValueError when the tokens do not fit the outline."""
    length = outline.length
    if not np.array_equal(outline.outputs, tokens.outputs):
        found, known = tokens.outputs.tolist(), outline.outputs.tolist()
        raise ValueError(f"trajectory {outline.trajectory_id}: its outputs are at {found}, recorded are {known}")
    loss_mask = np.zeros(length, np.bool_)
    versions = np.full(length, PROMPT_VERSION, np.int32)
    turn_ids = np.full(length, -1, np.int32)
    temperatures = np.ones(length, np.float32)
    for call, (start, end) in enumerate(outline.outputs.tolist()):
        turn_ids[start:end] = call
        temperatures[start:end] = outline.temperatures[call]
    for _, version, start, end in outline.sampled.tolist():
        versions[start:end] = version
    for _, _, start, end in outline.trained.tolist():
        loss_mask[start:end] = True
    return TrajectoryTokens(
        trajectory_id=outline.trajectory_id,
        session_id=outline.session_id,
        episode_id=outline.episode_id,
        group_id=outline.group_id,
        input_ids=tokens.input_ids,
        loss_mask=loss_mask,
        logprobs=tokens.logprobs,
        versions=versions,
        turn_ids=turn_ids,
        temperatures=temperatures,
        turn_returns=outline.turn_returns,
        episode_return=outline.episode_return,
        named_returns=outline.named_returns,
        calls=outline.calls,
        prompts=outline.prompts,
        kv_mixed_turns=frozenset(np.flatnonzero(outline.kv_mixed).tolist()),
        routed=tokens.routed,
        truncated=outline.truncated,
        greedy_return=outline.greedy_return,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOutline:
    """A leased batch without its tokens: whole groups, oldest first. `version` is the policy's before the step."""

    step_id: str
    step: int
    version: int
    trajectories: list[Outline]
    ages: dict[int, int]  # weight version of a token in the batch → its age at this step (staleness.ages)
    replayed: frozenset[str] = frozenset()  # groups that an earlier step has trained already

    @property
    def fresh(self) -> list[Outline]:
        """The trajectories that no earlier step has trained: a sample of what the policy does, without selection."""
        return [one for one in self.trajectories if one.group_id not in self.replayed]

    @property
    def wasted_tokens(self) -> int:
        """Tokens that were sampled and are trainable, but too old."""
        return sum(one.wasted_tokens for one in self.trajectories)
