"""Trajectories with more tokens than a microbatch should have: computed alone or refused (`trainer.over_budget`).

A forward pass needs the tokens before a trajectory's last loss token. A trajectory is never cut: each of its tokens
sees all earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentrl.domain.batches.outline import Outline
from agentrl.trainer.run.trainer_state import Trainer, say

REASON = "over_budget"
"""Why a group was refused that has such a trajectory."""


def limit(t: Trainer) -> int:
    """Tokens that a microbatch should have at most: the budget of a rank for each context rank."""
    return t.config.trainer.token_budget * t.world.mesh.context_size


def longer(trajectories: Iterable[Outline], tokens: int) -> list[Outline]:
    """Those that need more than so many tokens."""
    return [one for one in trajectories if one.computed_tokens > tokens]


def refused_groups(t: Trainer, trajectories: Iterable[Outline]) -> dict[str, str]:
    """Group → reason, for the groups that do not train because of a trajectory's length. Empty unless so configured."""
    if t.config.trainer.over_budget != "refuse":
        return {}
    return {one.group_id: REASON for one in longer(trajectories, limit(t))}


def report(t: Trainer, trajectories: Sequence[Outline]) -> float:
    """Count the trajectories over the limit, and warn of the first ones of this process. Called on every rank."""
    found = longer(trajectories, limit(t))
    if found and not t.warned_over_budget:
        t.warned_over_budget = True
        longest = max(one.computed_tokens for one in found)
        say(
            t,
            f"{len(found)} trajectories have more than {limit(t)} tokens, up to {longest}: each is computed in a "
            "microbatch of its own, which needs more memory than trainer.tokens_per_microbatch allows for. More "
            "resources.trainer.context or trainer.over_budget: refuse would avoid that",
        )
    return float(len(found))
