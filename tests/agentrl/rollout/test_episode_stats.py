"""What an episode measures belongs to it alone, whatever task or thread measures it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl.areal import stats_tracker
from agentrl.domain.session_stats import MOST_STATS
from agentrl.errors import UserError
from agentrl.rollout.episode_stats import measure, run_measured
from agentrl.rollout.score import Result, Reward


class Measures:
    """Adds `data["values"]` here, in a task and in a thread."""

    def __init__(self, result: Any = None) -> None:
        self.result = result

    async def run(self, data: dict[str, Any], **extra: Any) -> Any:
        async def in_a_task(value: float) -> None:
            await asyncio.sleep(0)
            stats_tracker.get(data["scope"]).scalar(value=value)

        first, second, third = data["values"]
        stats_tracker.get(data["scope"]).scalar(value=first, other=float("nan"))
        await asyncio.create_task(in_a_task(second))
        await asyncio.to_thread(measure, "value", third, data["scope"])
        return self.result


async def test_episodes_that_run_at_the_same_time_keep_their_own_values() -> None:
    agent = Measures()
    tasks = [{"scope": "rollout", "values": [i, i, i + 3.0]} for i in range(3)]
    results = await asyncio.gather(*(run_measured(agent, task) for task in tasks))
    assert [one.stats for one in results] == [{"value": i + 1.0} for i in range(3)]


@pytest.mark.parametrize(
    ("scope", "name"), [("", "value"), ("rollout", "value"), ("eval-rollout", "value"), ("tool", "tool/value")]
)
async def test_the_scope_of_rollouts_is_no_part_of_a_name(scope: str, name: str) -> None:
    result = await run_measured(Measures(), {"scope": scope, "values": [1.0, 1.0, 1.0]})
    assert result.stats == {name: 1.0}


async def test_a_result_adds_its_stats_to_those_that_were_measured() -> None:
    returned = Result(rewards=(Reward(value=1.0),), stats={"turns": 3})
    result = await run_measured(Measures(returned), {"scope": "", "values": [1.0, 2.0, 3.0]})
    assert result == Result(rewards=(Reward(value=1.0),), stats={"turns": 3.0, "value": 2.0})


async def test_too_many_names_fail_the_episode() -> None:
    class Floods:
        async def run(self, data: dict[str, Any], **extra: Any) -> Any:
            for i in range(MOST_STATS + 1):
                measure(f"x{i}", 1.0)

    with pytest.raises(UserError, match="stats: 'x32' would be name 33 of this episode; at most 32"):
        await run_measured(Floods(), {})


def test_outside_of_an_episode_only_the_process_has_the_value() -> None:
    stats_tracker.export_all()
    stats_tracker.get("rollout").scalar(value=1.0)
    stats_tracker.get("rollout").scalar(value=2.0)
    stats_tracker.get().scalar(value=3.0)
    assert stats_tracker.export_all() == {"rollout/value": 1.5, "value": 3.0}
    assert stats_tracker.export_all() == {}
