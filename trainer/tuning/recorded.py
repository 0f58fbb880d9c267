"""Makes items from trajectories of a run, with every sampled token trained, whatever its age.

An output is trained in exactly one of the paths that share it, as in the run itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from agentrl.configs.tuning_config import DataConfig, PairDataConfig, SftDataConfig
from agentrl.domain.schemas import Json, TrajectoryTokens
from agentrl.domain.ties import tied
from agentrl.errors import UserError, did_you_mean
from agentrl.store import Database, runs
from agentrl.store.exports import likeliest_tokens
from agentrl.store.training import recorded_paths
from agentrl.store.training.paths import upstream_answers as upstream_answers_of
from agentrl.store.training.paths.upstream_answers import UpstreamAnswer
from agentrl.trainer.packing import Likeliest
from agentrl.trainer.tuning.items import Item, imitated, pair

PAGE = 256
"""How many trajectories one transaction reads."""


def base_model(database: Database, data: DataConfig) -> str:
    """The folder of the model that the run began with. Raises UserError for an unknown run."""
    assert data.run is not None
    return str(database.query(runs.by_name, data.run).base_model)


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


def upstream_answers(database: Database, data: SftDataConfig) -> list[UpstreamAnswer]:
    """The answers of the upstream in the run. Raises UserError for an unknown run, and for an upstream without answers,
    with the nearest name of one that has some.
    """
    assert data.run is not None
    assert data.upstream is not None
    run = database.query(runs.by_name, data.run)
    ids = database.query(upstream_answers_of.ids, run.id, data.upstream)
    if not ids:
        known = (run.config.get("proxy") or {}).get("upstreams") or {}
        raise UserError(
            f"data.upstream: {data.upstream!r} has answered nothing in completed sessions of run {data.run!r}"
            f"{did_you_mean(data.upstream, set(known) - {data.upstream})}"
        )
    pages = (ids[start : start + PAGE] for start in range(0, len(ids), PAGE))
    return [answer for page in pages for answer in database.query(upstream_answers_of.read, page)]


def distributions(database: Database, found: Sequence[TrajectoryTokens]) -> dict[str, Likeliest]:
    """Trajectory → the recorded likeliest tokens of its calls; those without any are left out."""
    made: dict[str, Likeliest] = {}
    for start in range(0, len(found), PAGE):
        page = {t.trajectory_id: t for t in found[start : start + PAGE]}
        for name, calls in database.query(likeliest_tokens.of_trajectories, list(page)).items():
            made[name] = _placed(page[name], calls)
    return made


def _placed(t: TrajectoryTokens, calls: Sequence[Json]) -> Likeliest:
    """The likeliest tokens of calls at their places in a trajectory. Raises UserError for calls of other lengths."""
    width = max(call["ids"].shape[1] for call in calls)
    ids, logprobs = np.full((t.length, width), -1, np.int32), np.zeros((t.length, width), np.float32)
    for call in calls:
        here = slice(call["start"], call["start"] + len(call["ids"]))
        if not (t.turn_ids[here] >= 0).all() or here.stop > t.length:
            raise UserError(f"data.run: the likeliest tokens of trajectory {t.trajectory_id} do not fit its outputs")
        known = np.isfinite(call["logprobs"])
        ids[here, : call["ids"].shape[1]] = np.where(known, call["ids"], -1)
        logprobs[here, : call["ids"].shape[1]] = np.where(known, call["logprobs"], 0)
    return Likeliest(ids, logprobs, t.temperatures)


def conversations(
    found: Sequence[TrajectoryTokens], data: SftDataConfig, likeliest: Mapping[str, Likeliest] | None = None
) -> list[Item]:
    """Each trajectory of the best episodes of its group that reach `min_reward`."""
    known = likeliest or {}
    items: list[Item] = []
    for members in _groups(found):
        returns = {t.episode_id: t.episode_return for t in members}
        best = sorted(returns, key=lambda episode: -returns[episode])  # stable: the first of equal ones
        chosen = {e for e in best[: data.best_of_group] if data.min_reward is None or returns[e] >= data.min_reward}
        items += [[imitated(t, known.get(t.trajectory_id))] for t in members if t.episode_id in chosen]
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
