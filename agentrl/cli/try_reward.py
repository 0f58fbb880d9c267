"""`agentrl try-reward`: scores given or recorded answers with a config's reward functions."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.located import DatabaseUrl, Run, opened
from agentrl.errors import UserError
from agentrl.visible import say

if TYPE_CHECKING:
    from agentrl.domain.schemas import Json
    from agentrl.rollout.rewards.reward_trial import Tried

SHOWN_CHARACTERS = 60


def try_reward(
    config: Annotated[Path, typer.Argument(help="A run's YAML file with `reward`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, e.g. reward.timeout_s=5.")] = None,
    answers: Annotated[
        Path | None, typer.Option(help="JSONL file: tasks, each with its answer in `completion`.")
    ] = None,
    run: Run = None,
    database_url: DatabaseUrl = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Number of answers, a run's newest first.")] = 100,
) -> None:
    """Score the answers of a file, or of a recorded run, and print the rewards. Records nothing.

    Exit status 1 means that a reward could not be computed.
    """
    import asyncio

    from agentrl.configs.config_files import load_config
    from agentrl.rollout.rewards.reward_trial import read_answers, try_answers

    settings = load_config(config, overrides)
    if settings.reward is None:
        raise UserError(f"{config} has no `reward`")
    if (answers is None) == (run is None and database_url is None):
        raise UserError("give either --answers FILE or --run NAME")
    chosen = list(islice(read_answers(answers, settings), limit)) if answers else _recorded(run, database_url, limit)
    if not chosen:
        raise UserError("there is no answer to score")
    tried = asyncio.run(try_answers(settings.reward, chosen))
    for number, one in enumerate(tried):
        said = " ".join(str(one.answer["completion"]).split())[:SHOWN_CHARACTERS]
        say(f"{number}: {_values(one)}  {one.wall_s * 1000:.0f} ms  {said!r}")
    say(_summary(tried))
    if any(one.error for one in tried):
        raise typer.Exit(1)


def _recorded(run: str | None, database_url: str | None, limit: int) -> list[Json]:
    """The answers of a run's newest completed sessions."""
    from agentrl.rollout.rewards.reward_trial import recorded_answer
    from agentrl.store.sessions import rescoring_view

    with opened(run, database_url) as store:
        ids = store.database.query(rescoring_view.newest, store.run().id, limit)
        found = [recorded_answer(store.database.query(rescoring_view.describe, one)) for one in ids]
    return [answer for answer in found if answer is not None]


def _values(tried: Tried) -> str:
    if tried.score is None:
        return str(tried.error)
    parts = [f"{reward.name} {reward.value:g}" for reward in tried.score.rewards]
    sum_ = f" = {tried.score.value:g}" if len(parts) > 1 else ""
    stats = [f"{name} {value:g}" for name, value in tried.score.stats.items()]
    return " + ".join(parts) + sum_ + (f"  ({', '.join(stats)})" if stats else "")


def _summary(tried: list[Tried]) -> str:
    """One line: how many answers, the mean of each reward and number, failures, and the slowest call."""
    named: dict[str, list[float]] = {}
    for score in (one.score for one in tried if one.score is not None):
        for name, value in [*((one.name, one.value) for one in score.rewards), *score.stats.items()]:
            named.setdefault(name, []).append(value)
    means = [f"{name} {sum(values) / len(values):.3f}" for name, values in named.items()]
    failed = sum(one.error is not None for one in tried)
    slowest = max(one.wall_s for one in tried)
    return f"{len(tried)} answers, {failed} failed; mean {', '.join(means) or 'none'}; slowest {slowest:.2f} s"
