"""What a step's page shows of its batch: ties, ages, histograms' values, and its returns under another discount."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from agentrl.domain.schemas import Json
from agentrl.domain.ties import tied
from agentrl.store.training.returns import SessionReturns
from agentrl.store.views.results import step_time

AGE = "off_policy/age_"
"""Metrics that begin so are the share of the trained tokens that had this age, in versions."""


@dataclass(frozen=True, slots=True)
class Recredited:
    """A trajectory's recorded credit beside that of another discount. `over_*`: the return minus its group's mean."""

    trajectory_id: str
    session_id: str
    advantage: float | None
    old: float
    new: float
    over_old: float
    over_new: float

    @property
    def flips(self) -> bool:
        """Whether its sign in comparison with its group changes."""
        return self.over_old * self.over_new < 0


def told(group: Json) -> Json:
    """A group with the returns of its episodes, whether they are tied, and how many have none."""
    returns = [one["return_"] for one in group["episodes"] if one["return_"] is not None]
    return group | {
        "returns": returns,
        "tied": bool(returns) and tied(returns),
        "mean": fmean(returns) if returns else None,
    }


def ages(metrics: Mapping[str, float | None]) -> list[tuple[int, float]]:
    """Age in versions and the share of the trained tokens with it, youngest first."""
    found = [(name[len(AGE) :], value) for name, value in metrics.items() if name.startswith(AGE)]
    return sorted((int(age), value) for age, value in found if age.isdigit() and value is not None)


def seconds(metrics: Mapping[str, float | None]) -> list[tuple[str, float]]:
    """The measured parts of the step's time, in order, as the page of the pipeline shows them."""
    return [(step_time.PARTS[name][0], value) for name, value in step_time.parts(metrics).items()]


def recredited(
    paths: Sequence[Json], old: Mapping[str, SessionReturns], new: Mapping[str, SessionReturns]
) -> list[Recredited]:
    """The trajectories under another credit, those that change most first; `old` and `new` are by session."""
    before, after = _over(paths, old), _over(paths, new)
    found = [
        Recredited(
            path["id"],
            path["session_id"],
            path["advantage"],
            old[path["session_id"]].episode_return,
            new[path["session_id"]].episode_return,
            before[path["session_id"]],
            after[path["session_id"]],
        )
        for path in paths
    ]
    return sorted(found, key=lambda one: (not one.flips, -abs(one.over_new - one.over_old), one.trajectory_id))


def _over(paths: Sequence[Json], returns: Mapping[str, SessionReturns]) -> dict[str, float]:
    """Session → the return of its episode minus the mean over the episodes of its group."""
    groups: dict[str, dict[str, float]] = {}
    for path in paths:
        credit = returns[path["session_id"]]
        groups.setdefault(path["group_id"], {})[credit.episode_id] = credit.episode_return
    means = {group_id: fmean(episodes.values()) for group_id, episodes in groups.items()}
    return {path["session_id"]: returns[path["session_id"]].episode_return - means[path["group_id"]] for path in paths}
