"""Audit of calls: status, version spans, and the exact tokens that the engine got."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from sqlalchemy import Row
from zstandard import ZstdError

from agentrl.domain.schemas import InteractionStatus, Role
from agentrl.store.audit.group_rows import CLOCK_SLACK_S, GroupRows
from agentrl.store.audit.lineage_audit import Lineage
from agentrl.store.db import codec

LOGPROB_SLACK = 1e-3
"""A certain token's logprob may round to a little above 0."""


def check_call(rows: GroupRows, call: Row[Any], lineage: Lineage) -> Iterator[str]:
    name, parent = f"interactions {call.id}", rows.calls.get(call.parent_id)
    recorded = call.status in (InteractionStatus.COMPLETE, InteractionStatus.ABORTED) and call.seq is not None
    if call.run_id != rows.group.run_id:
        yield f"{name}: it is of another run than its session"
    if call.status == InteractionStatus.COMPLETE and call.seq is None:
        yield f"{name}: it is complete without a seq"
    if recorded != (call.output_ids is not None):
        yield f"{name}: it is {call.status} and holds {'no ' if call.output_ids is None else ''}tokens"
    if not recorded and call.seq is not None:
        yield f"{name}: it is {call.status} with seq {call.seq}"
    if (call.status == InteractionStatus.RUNNING) != (call.finished_at is None):
        yield f"{name}: it is {call.status}, finished at {call.finished_at}"
    if call.bridged != (call.parent_id is not None):
        yield f"{name}: bridged is {call.bridged} but its parent is {call.parent_id}"
    if call.parent_id is not None:
        if parent is None or parent.session_id != call.session_id:
            yield f"{name}: its parent {call.parent_id} is not of its session"
        elif parent.status != InteractionStatus.COMPLETE or (call.seq is not None and not parent.seq < call.seq):
            yield f"{name}: its parent {call.parent_id} was not delivered before it"
    if call.trainable and (rows.group.is_eval or call.temperature <= 0 or call.role == Role.UPSTREAM):
        yield f"{name}: it is trainable, but greedy, of an evaluation, or not the policy's"
    if call.output_ids is None:
        return
    yield from _check_experts(name, rows, call, parent, lineage)
    try:
        output, logprobs = codec.unpack_ids(call.output_ids), codec.unpack_logprobs(call.logprobs)
    except (ZstdError, ValueError):
        yield f"{name}: its tokens or logprobs cannot be decoded"
        return
    if not len(output) == call.output_tokens == len(logprobs):
        yield f"{name}: output ids, logprobs and count disagree"
    if not (np.isfinite(logprobs) & (logprobs <= LOGPROB_SLACK)).all():
        yield f"{name}: a logprob is not finite, or above 0"
    borders = [0, *(end for _, _, end in call.spans)]
    if (
        borders[-1] != len(output)
        or [start for _, start, _ in call.spans] != borders[:-1]
        or (borders != sorted(set(borders)))
    ):
        yield f"{name}: version spans {call.spans} do not cover {len(output)} tokens"
    versions = [version for version, _, _ in call.spans]
    if (call.min_version, call.max_version) != (min(versions, default=None), max(versions, default=None)):
        yield f"{name}: versions {call.min_version} to {call.max_version} are not those of its spans {call.spans}"
    for version in sorted(set(versions)):
        known = lineage.versions.get(version)
        if known is None:
            yield f"{name}: version {version} sampled it, which does not exist"
        elif call.finished_at is not None and known.created_at > call.finished_at + CLOCK_SLACK_S:
            yield f"{name}: version {version} sampled it before it was made"


def _check_experts(
    name: str, rows: GroupRows, call: Row[Any], parent: Row[Any] | None, lineage: Lineage
) -> Iterator[str]:
    """Check that every position of a call whose routing is replayed has an origin."""
    if call.routed_positions is None:
        if lineage.replays_routing and not rows.group.is_eval and call.role != Role.UPSTREAM:
            yield f"{name}: no experts are recorded"
        return
    start = parent.prompt_tokens + parent.output_tokens - 1 if parent is not None else 0
    positions = max(0, call.prompt_tokens + call.output_tokens - 1 - start)
    if (call.routed_start, call.routed_positions) != (start, positions):
        yield (
            f"{name}: experts of {call.routed_positions} positions from {call.routed_start} on are recorded, not of "
            f"{positions} from {start} on"
        )


def check_tokens(rows: GroupRows) -> Iterator[str]:
    """Check that the engine got exactly the parent's tokens and the call's own delta for each call."""
    ends: dict[str, tuple[Any, int]] = {}  # call → digest state and length of its whole sequence
    for call in rows.calls.values():
        if call.output_ids is None:
            continue
        digest, length = ends.get(call.parent_id or "", (hashlib.blake2b(digest_size=16), 0))
        digest = digest.copy()
        try:
            delta, output = codec.unpack_ids(call.prompt_delta_ids), codec.unpack_ids(call.output_ids)
        except (ZstdError, ValueError):
            yield f"interactions {call.id}: its prompt or output cannot be decoded"
            continue
        digest.update(delta.astype("<i4").tobytes())
        if (digest.hexdigest(), length + len(delta)) != (call.prompt_digest, call.prompt_tokens):
            yield f"interactions {call.id}: the engine got another prompt than its parent's tokens and its own delta"
        digest.update(output.astype("<i4").tobytes())
        ends[call.id] = (digest, length + len(delta) + len(output))
