"""Settings that are valid together and rarely what their user wants: said once, where the run is started."""

from __future__ import annotations

from agentrl.configs.run_config import RunConfig


def of(config: RunConfig) -> list[str]:
    """One line each."""
    return [text for text in (_discounted_turns(config),) if text is not None]


def _discounted_turns(config: RunConfig) -> str | None:
    """Baselines of returns are of whole episodes; only a critic has one for each turn."""
    discount, algorithm = config.rollout.turn_discount, config.trainer.algorithm
    if discount == 1 or algorithm.credit != "turn" or algorithm.estimator != "returns" or not config.steps:
        return None
    return (
        f"caution: rollout.turn_discount {discount:g} with trainer.algorithm.credit turn: where a group's episodes "
        "differ in their number of turns, the last turns of rewarded episodes get a large positive advantage, those of "
        "worse episodes too; turn_discount: 1 or credit: trajectory avoids it (docs/algorithms.md, Discounted turns)"
    )
