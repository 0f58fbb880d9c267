"""Makes items from trajectories of a run, with every sampled token trained, whatever its age.

An output is trained in exactly one of the paths that share it, as in the run itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from agentrl.configs.tuning_config import DataConfig, PairDataConfig, SftDataConfig
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.domain.ties import tied
from agentrl.store import Database, runs
from agentrl.store.training import recorded_paths
from agentrl.trainer.tuning.items import Item, imitated, pair

PAGE = 256
"""How many trajectories one transaction reads."""


def read(database: Database, data: DataConfig) -> list[TrajectoryTokens]:
    """The trajectories that the filters select, ordered by group. Raises UserError for an unknown run."""
    assert data.run is not None
    run_id = database.query(runs.by_name, data.run).id
    ids = database.query(
        recorded_paths.trainable_ids, run_id, data.states, min_version=data.min_version, max_version=data.max_version
    )
    found: list[TrajectoryTokens] = []
    for start in range(0, len(ids), PAGE):
        found += database.query(recorded_paths.load_whole, run_id, ids[start : start + PAGE])
    return [t for t in found if t.loss_mask.any()]


def conversations(found: Sequence[TrajectoryTokens], data: SftDataConfig) -> list[Item]:
    """Each trajectory of the best episodes of its group that reach `min_reward`."""
    items: list[Item] = []
    for members in _groups(found):
        returns = {t.episode_id: t.episode_return for t in members}
        best = sorted(returns, key=lambda episode: -returns[episode])  # stable: the first of equal ones
        chosen = {e for e in best[: data.best_of_group] if data.min_reward is None or returns[e] >= data.min_reward}
        items += [[imitated(t)] for t in members if t.episode_id in chosen]
    return items


def pairs(found: Sequence[TrajectoryTokens], data: PairDataConfig) -> list[Item]:
    """Pairs of a group's answers to the same prompt: best with worst, second best with second worst, and so on.

    When an episode has several paths from one prompt, the path with the most trained tokens represents it.
    """
    items: list[Item] = []
    for members in _groups(found):
        made: list[Item] = []
        for answers in _by_prompt(members):
            ranked = sorted(answers, key=lambda t: -t.episode_return)
            for better, worse in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
                returns = (better.episode_return, worse.episode_return)
                margin = returns[0] - returns[1]
                differ = not tied(returns) and not np.array_equal(better.input_ids, worse.input_ids)
                if (
                    differ
                    and margin >= data.min_margin
                    and (data.min_reward is None or better.episode_return >= data.min_reward)
                ):
                    name = f"{better.group_id}.{better.trajectory_id}"
                    made.append(pair(imitated(better), imitated(worse), name))
        made.sort(key=lambda item: item[1].tokens.episode_return - item[0].tokens.episode_return)
        items += made[: data.pairs_per_group]
    return items


def _groups(found: Sequence[TrajectoryTokens]) -> Iterator[list[TrajectoryTokens]]:
    for _, members in groupby(found, key=lambda t: t.group_id):
        yield list(members)


def _by_prompt(members: Sequence[TrajectoryTokens]) -> list[list[TrajectoryTokens]]:
    """Trajectories with the same tokens before the first sampled one, one per episode."""
    prompts: dict[bytes, dict[str, TrajectoryTokens]] = {}
    for t in members:
        first: Any = np.flatnonzero(t.turn_ids >= 0)[0]
        episodes = prompts.setdefault(t.input_ids[:first].tobytes(), {})
        other = episodes.get(t.episode_id)
        if other is None or t.loss_mask.sum() > other.loss_mask.sum():
            episodes[t.episode_id] = t
    return [list(episodes.values()) for episodes in prompts.values()]
