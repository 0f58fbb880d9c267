"""Compares the tensors that a workflow returns with the answers that were recorded, and finds the tokens that train.

input_ids   p p p o o o o p p o o o        p: prompt, o: sampled
loss_mask   0 0 0 1 1 1 0 0 0 1 1 1   ──►  {first call: [[0, 3]], second call: [[0, 3]]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl.domain.verdicts import Range
from agentrl.errors import UserError
from agentrl.rollout.workflows.session_engine import Sampled

REQUIRED = ("input_ids", "loss_mask", "rewards")
TOLERANCE = 1e-4
"""Largest difference between a returned and a recorded logprob (float32)."""


def trained_ranges(result: Mapping[str, Any], sampled: Sequence[Sampled]) -> tuple[dict[str, list[Range]], float]:
    """The ranges of output tokens that train, by call, and the reward.

    Raises UserError that names the field and the token where the result differs from the recorded calls.
    """
    if missing := [name for name in REQUIRED if name not in result]:
        raise UserError(f"arun_episode: the returned dict has no {missing[0]!r}")
    ids = _row(result, "input_ids")
    length = len(ids) if "attention_mask" not in result else int(_row(result, "attention_mask", len(ids)).sum())
    mask = _row(result, "loss_mask", len(ids))[:length].astype(bool)
    claims = {name: _row(result, name, len(ids))[:length] for name in ("logprobs", "versions") if name in result}
    return _match(ids[:length].tolist(), mask, claims, sampled), _reward(result["rewards"])


def _match(
    ids: list[int], mask: np.ndarray[Any, Any], claims: Mapping[str, Any], sampled: Sequence[Sampled]
) -> dict[str, list[Range]]:
    open_ = mask.copy()  # tokens of the loss that belong to no call yet
    found: dict[str, list[Range]] = {}
    for call in sampled:
        start = len(call.prompt)
        tokens = call.output[: max(0, len(ids) - start)]
        if not tokens or ids[:start] != call.prompt or ids[start : start + len(tokens)] != tokens:
            continue
        mine = open_[start : start + len(tokens)].copy()
        _check(claims, start, call, mine)
        open_[start : start + len(tokens)] = False
        if ranges := _ranges(mine):
            found[call.call_id] = ranges
    if open_.any():
        at = int(np.flatnonzero(open_)[0])
        raise UserError(
            f"arun_episode: loss_mask is 1 at token {at} (id {ids[at]}), which no call of this episode sampled there"
        )
    return found


def _check(claims: Mapping[str, Any], start: int, call: Sampled, mine: np.ndarray[Any, Any]) -> None:
    """Raise UserError where logprobs or versions of the loss's tokens are not the recorded ones."""
    for name, recorded in (("logprobs", call.logprobs), ("versions", call.versions)):
        if name not in claims:
            continue
        claimed = claims[name][start : start + len(mine)].astype(np.float64)
        differs = np.abs(claimed - np.array(recorded[: len(mine)], np.float64)) > TOLERANCE
        if (differs & mine).any():
            at = int(np.flatnonzero(differs & mine)[0])
            raise UserError(
                f"arun_episode: {name} is {claimed[at]:g} at token {start + at}, but the engine reported "
                f"{recorded[at]:g}"
            )


def _ranges(mask: np.ndarray[Any, Any]) -> list[Range]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _row(result: Mapping[str, Any], name: str, length: int | None = None) -> np.ndarray[Any, Any]:
    """One field as an array of shape (T,)."""
    try:
        array = np.asarray(result[name])
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"arun_episode: {name} is no array: {error}") from None
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1:
        raise UserError(
            f"arun_episode: {name} has shape {tuple(array.shape)}, not (1, T): return one sequence per episode "
            "(rollout.group_size is the number of episodes per task)"
        )
    if length is not None and len(array) != length:
        raise UserError(f"arun_episode: {name} has {len(array)} entries, but input_ids has {length}")
    if not np.issubdtype(array.dtype, np.number) and array.dtype != np.bool_:
        raise UserError(f"arun_episode: {name} holds {array.dtype}, not numbers")
    return array


def _reward(value: Any) -> float:
    array = np.asarray(value, np.float64)
    if array.size != 1:
        raise UserError(f"arun_episode: rewards has {array.size} entries, not 1")
    return float(array.reshape(()))
