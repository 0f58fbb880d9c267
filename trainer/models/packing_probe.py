"""Decides whether a loaded model can be computed packed, only unpacked, or not at all.

    two sequences with a common prefix ─► transformers' own forward of each ─► fails, not causal, other logits: refused
        │
        ├─► a mechanism for which forests are not exact (mechanisms.py): unpacked
        └─► packed along their tree ─► hidden states differ from those of each alone: unpacked
                                    └► the same: packed

H: hidden size, T: tokens of a sequence, K: positions whose logits are compared, V: vocabulary.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.domain.schemas import PROMPT_VERSION, TrajectoryTokens
from agentrl.errors import ModelFolderError, UnknownAttention
from agentrl.trainer.models import mechanisms
from agentrl.trainer.models.head import head_of, logits_of
from agentrl.trainer.models.policy import Body, Policy
from agentrl.trainer.packing import Microbatch, Sample, Unit, collate, forest, make_units

ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 0.06}
"""Compute type → largest distance between the hidden states of two ways to compute them, relative to their size."""
ROUNDING = 4
"""Rounding changes the choice of experts. So ROUNDING times the distance between two attention functions of
transformers is allowed too.
"""
NEXT, LEAKED = 4, 4
"""A state that leaks into another sequence shows in its next tokens. The mean difference of the next NEXT tokens may be
LEAKED times the allowed distance."""
SHORT = 24
"""Tokens of the common prefix. One sequence is 2.5 times as long, the other twice."""
LONGEST_WINDOW = 128
"""The sequences are longer than a sliding window of at most this many tokens."""
COMPARED = 8
"""Positions whose logits are compared."""
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, ImportError, AttributeError)
"""The exceptions of transformers' models that cannot compute as asked."""


@torch.no_grad()
def choose(model: Body, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Decide how `model` reads its microbatches; all ranks decide the same. Collective.

    Raises ModelFolderError when transformers' own forward cannot be used.
    """
    sequences = _sequences(model.lm)
    alone = _alone(model, sequences, folder, device, ALLOWED[dtype])
    why = mechanisms.unpackable(model.lm)
    model.read(why)
    if not why:
        rounding = _rounding(model, sequences, alone, device) if dtype != torch.float32 else 0.0
        try:
            why = _difference(model, sequences, alone, device, max(ALLOWED[dtype], ROUNDING * rounding))
        except UnknownAttention as error:
            model.read(str(error), plainly=True)
        else:
            model.read(why)


def _sequences(lm: Any) -> list[list[int]]:
    """Two sequences with a common prefix. Both are longer than the model's window, if that is short."""
    config = lm.config.get_text_config()
    longest: int = getattr(config, "max_position_embeddings", None) or 10**9
    window = mechanisms.window(lm) or 0
    prefix = min(max(SHORT, window if window <= LONGEST_WINDOW else 0), longest * 2 // 5)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, prefix * 5 // 2)).tolist()
    return [ids[0], (ids[0][:prefix] + ids[1][prefix:])[: 2 * prefix]]


def _alone(model: Body, sequences: list[list[int]], folder: Path, device: torch.device, allowed: float) -> list[Tensor]:
    """(T, H) of each sequence, by transformers' own forward."""
    what = f"model folder {folder}: {type(model.lm).__name__}"
    model.read("compared")
    try:
        first, second = model.within(lambda: [model.alone(torch.tensor(ids, device=device)) for ids in sequences])
        logits = _logits_apart(model, sequences[0], first, device) if isinstance(model, Policy) else 0.0
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise ModelFolderError(f"{what} fails in transformers' forward: {_line(error)}") from error
    if _largest_of_ranks(float(not all(found.isfinite().all() for found in (first, second)))):
        raise ModelFolderError(f"{what}: its hidden states are not finite numbers")
    prefix = _common(sequences)
    if _largest_of_ranks(_relative_distance(first[:prefix], second[:prefix])) > allowed:
        raise ModelFolderError(f"{what} is not causal: the hidden states of a prefix depend on what follows it")
    if _largest_of_ranks(logits) > allowed:
        raise ModelFolderError(f"{what}: its logits are not hidden · weightᵀ, times a constant that is known")
    return [first, second]


def _logits_apart(policy: Policy, ids: list[int], hidden_TH: Tensor, device: torch.device) -> float:
    """The distance between transformers' logits and ours, relative to their size."""

    def both() -> tuple[Tensor, Tensor]:
        whole_KV = policy.lm(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, -COMPARED:]
        ours_KV = logits_of(hidden_TH[-COMPARED:], head_of(policy.lm.get_output_embeddings().weight)) * policy.scale
        return ours_KV, whole_KV

    return _relative_distance(*policy.within(both))


def _difference(
    model: Body, sequences: list[list[int]], alone: list[Tensor], device: torch.device, allowed: float
) -> str:
    """Why the model cannot be packed; empty when it can. Raises UnknownAttention when it needs another attention."""
    batch, paths = _packed(sequences)
    batch = batch.to(device)

    try:
        packed_NH = model.within(lambda: model.packed(batch))
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        return f"{type(model.lm).__name__} does not take packed sequences: {_line(error)}"
    if (window := mechanisms.window(model.lm)) and window not in batch.tree.windows:
        return f"its window of {window} tokens is not told to attention"
    prefix = _common(sequences)
    tails = [(packed_NH[path[prefix:]], found[prefix:]) for path, found in zip(paths, alone, strict=True)]
    worst = _largest_of_ranks(max(_relative_distance(*tail) for tail in tails))
    leaked = _largest_of_ranks(max(float(_gaps(a[:NEXT], b[:NEXT]).mean()) for a, b in tails))
    if worst > allowed or leaked > LEAKED * allowed:
        return f"packed, its hidden states are off by {max(worst, leaked):.2g} of their size"
    return ""


def _rounding(model: Body, sequences: list[list[int]], alone: list[Tensor], device: torch.device) -> float:
    """The distance between transformers' default attention and its plain one; 0 when it is not a number."""
    model.lm.set_attn_implementation(mechanisms.PLAIN)
    plain = model.within(lambda: [model.alone(torch.tensor(ids, device=device)) for ids in sequences])
    model.read()
    worst = _largest_of_ranks(
        max(
            _relative_distance(a[_common(sequences) :], b[_common(sequences) :])
            for a, b in zip(plain, alone, strict=True)
        )
    )
    return worst if math.isfinite(worst) else 0.0


def _packed(sequences: list[list[int]]) -> tuple[Microbatch, list[Tensor]]:
    """The microbatch of both sequences, and the places of each in it."""
    (unit,) = make_units([_sample(i, ids) for i, ids in enumerate(sequences)], 10**9)
    return collate([unit]), [torch.from_numpy(path.astype(np.int64)) for path in _paths(unit)]


def _paths(unit: Unit) -> list[np.ndarray[Any, Any]]:
    by_name = {s.tokens.trajectory_id: path for s, path in zip(unit.samples, forest(unit.samples).paths, strict=True)}
    return [by_name[name] for name in sorted(by_name)]


def _sample(number: int, ids: list[int]) -> Sample:
    """A sequence's tokens and one more, which is only predicted."""
    n = len(ids) + 1
    last = np.arange(n) == n - 1
    tokens = TrajectoryTokens(
        trajectory_id=str(number),
        session_id="",
        episode_id="",
        group_id="",
        input_ids=np.array([*ids, 0], np.int32),
        loss_mask=last,
        logprobs=np.zeros(n, np.float32),
        versions=np.full(n, PROMPT_VERSION, np.int32),
        turn_ids=np.where(last, 0, -1).astype(np.int32),
        temperatures=np.ones(n, np.float32),
        turn_returns=np.zeros(1),
        episode_return=0.0,
    )
    return Sample(tokens, np.zeros(n, np.float32))


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _common(sequences: list[list[int]]) -> int:
    first, second = sequences
    return next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)


def _relative_distance(found: Tensor, expected: Tensor) -> float:
    """Median over tokens of ‖a − b‖ / ‖b‖. The median, because rounding may choose another expert for some tokens."""
    return float(_gaps(found, expected).median())


def _gaps(found: Tensor, expected: Tensor) -> Tensor:
    """(T,) ‖a − b‖ / ‖b‖, with infinity for NaN, since NaN exceeds no bound."""
    gap, size = (found.float() - expected.float()).norm(dim=-1), expected.float().norm(dim=-1)
    relative: Tensor = gap / size.clamp_min(1e-9)
    return relative.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _largest_of_ranks(apart: float) -> float:
    """The largest over all ranks. Collective."""
    worst = torch.tensor(apart, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()
