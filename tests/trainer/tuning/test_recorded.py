"""Trajectories of a run as data: exact tokens, whole masks, the filters, and pairs of one prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from history import History
from support import random_trajectory

from agentrl.configs.tuning_config import PairDataConfig, SftDataConfig
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.domain.selection import Selection
from agentrl.errors import UserError
from agentrl.store import Database
from agentrl.store.exports import row_pages
from agentrl.trainer.tuning import recorded


@pytest.fixture
def history(database_url: str) -> Iterator[History]:
    """Two trained steps, one leased, a stale group, ready, rejected and evaluated ones; another run beside it."""
    database = Database(database_url)
    History(database, name="other", seed=9).train(1)
    made = History(database, seed=1)
    made.train(2)
    made.group(versions=[0, 1, 2])
    made.group(versions=[0])  # too old for step 3: its group becomes stale when that is leased
    made.group()
    assert made.lease() is not None
    made.group()
    made.rejected()
    made.evaluation()
    yield made
    database.close()


def exported(history: History) -> dict[str, dict[str, Any]]:
    pages = row_pages.pages(history.db, history.run_id, Selection("trajectories"))
    return {row["trajectory_id"]: row for page in pages for row in page}


def test_tokens_equal_the_stores_and_outputs_of_any_age_are_trained(history: History) -> None:
    known = exported(history)
    found = recorded.read(history.db, SftDataConfig(run="test"))
    whole = {key for key, row in known.items() if row["state"] != "rejected" and row["trainable_tokens"]}
    assert {t.trajectory_id for t in found} == whole
    assert {known[t.trajectory_id]["state"] for t in found} == {"trained", "leased", "stale", "ready"}
    for t in found:
        np.testing.assert_array_equal(t.input_ids, known[t.trajectory_id]["input_ids"])
        assert t.loss_mask.sum() == known[t.trajectory_id]["trainable_tokens"]
        assert t.episode_return == known[t.trajectory_id]["return"]
    assert any(t.loss_mask.sum() > np.sum(known[t.trajectory_id]["loss_mask"]) for t in found)


def test_states_and_versions_filter(history: History) -> None:
    known = exported(history)
    ready = recorded.read(history.db, SftDataConfig(run="test", states=["ready"]))
    assert ready
    assert {known[t.trajectory_id]["state"] for t in ready} == {"ready"}
    first = recorded.read(history.db, SftDataConfig(run="test", max_version=0))
    assert first
    assert {known[t.trajectory_id]["max_version"] for t in first} == {0}
    later = recorded.read(history.db, SftDataConfig(run="test", min_version=1))
    assert {known[t.trajectory_id]["min_version"] for t in later} == {1, 2}
    assert not recorded.read(history.db, SftDataConfig(run="test", min_version=99))


def test_an_unknown_run_is_refused(history: History) -> None:
    with pytest.raises(UserError, match="no run named 'tset'; did you mean 'test'"):
        recorded.read(history.db, SftDataConfig(run="tset"))


def trajectory(
    name: str, value: float, *, group: str = "g", prompt: list[int] | None = None, **more: Any
) -> TrajectoryTokens:
    rng = np.random.default_rng(sum(name.encode()))
    made = random_trajectory(rng, prompt or [5, 6, 7], group=group, name=name, temperature=0.5)
    return dataclasses.replace(made, episode_return=value, **more)


def names(items: list[Any]) -> list[str]:
    return ["/".join(s.tokens.trajectory_id.partition("-")[2] for s in item) for item in items]


GROUP = [trajectory("a", 0.5), trajectory("b", 1.0), trajectory("c", 0.0), trajectory("d", 1.0)]
NEXT = [trajectory("e", 0.1 + 0.2 + 0.3, group="h"), trajectory("f", 0.3 + 0.2 + 0.1, group="h")]  # tied


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({}, ["a", "b", "c", "d", "e", "f"]),
        ({"min_reward": 0.5}, ["a", "b", "d", "e", "f"]),
        ({"best_of_group": 1}, ["b", "e"]),
        ({"best_of_group": 2}, ["b", "d", "e", "f"]),
        ({"best_of_group": 3, "min_reward": 0.7}, ["b", "d"]),
    ],
)
def test_the_best_episodes_are_imitated(filters: dict[str, Any], left: list[str]) -> None:
    items = recorded.conversations([*GROUP, *NEXT], SftDataConfig(run="test", **filters))
    assert names(items) == left
    for (sample,) in items:
        assert set(sample.tokens.temperatures.tolist()) == {1.0}
        np.testing.assert_array_equal(sample.advantages, sample.tokens.loss_mask)


def test_every_path_of_a_chosen_episode_is_imitated() -> None:
    sub = trajectory("sub", 1.0, episode_id=GROUP[1].episode_id)
    items = recorded.conversations([*GROUP, sub], SftDataConfig(run="test", best_of_group=1))
    assert names(items) == ["b", "sub"]


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({}, ["b/c"]),
        ({"pairs_per_group": 5}, ["b/c", "d/a"]),
        ({"pairs_per_group": 5, "min_margin": 0.6}, ["b/c"]),
        ({"min_reward": 1.5}, []),
    ],
)
def test_the_best_are_paired_with_the_worst(filters: dict[str, Any], left: list[str]) -> None:
    items = recorded.pairs([*GROUP, *NEXT], PairDataConfig(run="test", **filters))
    assert names(items) == left
    for chosen, rejected in items:
        assert chosen.advantages.max() == 1
        assert rejected.advantages.min() == -1
        assert chosen.tokens.group_id == rejected.tokens.group_id
    groups = [item[0].tokens.group_id for item in items]
    assert len(set(groups)) == len(groups)


def test_answers_to_different_prompts_make_no_pair() -> None:
    elsewhere = [trajectory("x", 9.0, prompt=[5, 6, 8]), trajectory("y", -9.0, prompt=[5, 6])]
    assert names(recorded.pairs([*GROUP, *elsewhere], PairDataConfig(run="test"))) == ["b/c"]


def test_the_path_with_the_most_trained_tokens_represents_an_episode() -> None:
    short = random_trajectory(np.random.default_rng(0), [5, 6, 7], group="g", name="short", turns=1)
    short = dataclasses.replace(short, episode_id=GROUP[1].episode_id, episode_return=1.0)
    assert names(recorded.pairs([short, *GROUP[1:3]], PairDataConfig(run="test", pairs_per_group=9))) == ["b/c"]
