"""Warnings for valid settings that rarely do what the user wants, printed when a run starts."""

from __future__ import annotations

from agentrl.configs.run_config import RunConfig


def of(config: RunConfig) -> list[str]:
    """One line per caution."""
    return [text for text in (_discounted_turns(config),) if text is not None]


def _discounted_turns(config: RunConfig) -> str | None:
    """Warn about discounted turns with a per-episode baseline. Only a critic has a baseline per turn."""
    discount, algorithm = config.rollout.turn_discount, config.trainer.algorithm
    if discount == 1 or algorithm.credit != "turn" or algorithm.estimator != "returns" or not config.steps:
        return None
    return (
        f"caution: rollout.turn_discount {discount:g} with trainer.algorithm.credit turn: when a group's episodes "
        "differ in their number of turns, the last turns of all episodes get a large positive advantage, also those of "
        "worse episodes; turn_discount: 1 or credit: trajectory avoids this (docs/algorithms.md, Discounted turns)"
    )
