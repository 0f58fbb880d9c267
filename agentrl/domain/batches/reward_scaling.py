"""Scales rewards for training: normalises them by running statistics, and clips them. Pure functions.

    recorded rewards of a step's batch ──► statistics of all batches until this one ──► rewards as they are trained

The store keeps the recorded rewards, and for each step the scales and the statistics that its batch was trained with.
So a step's numbers are a function of its rewards and of the step before, also after a resume and in a replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from agentrl.configs.episodes.reward_config import Normalize, RewardConfig
from agentrl.domain import credit
from agentrl.domain.credit import SessionRewards
from agentrl.domain.schemas import Json

EPSILON = 1e-6
"""Added to the deviation, in the unit of the function's values."""
MOST_SERIES = 4096
"""Statistics of one run at most. Later sources and names share the one of their component."""
OTHERS = ""
"""The name of the statistics that they share."""


class Moments(NamedTuple):
    """The number of values, their mean, and the sum of their squared deviations."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def deviation(self) -> float:
        """The population deviation σ = √(M / n); 0 without values."""
        return float((self.squares / self.n) ** 0.5) if self.n else 0.0

    def and_value(self, value: float) -> Moments:
        """With one value more: μ' = μ + (x − μ) / n', M' = M + (x − μ)(x − μ').

        Welford, "Note on a Method for Calculating Corrected Sums of Squares and Products", Technometrics 4 (1962),
        eq. (1).
        """
        n, gap = self.n + 1, value - self.mean
        mean = self.mean + gap / n
        return Moments(n, mean, self.squares + gap * (value - mean))

    def and_moments(self, other: Moments) -> Moments:
        """Of both together. Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm" (1979), eq. 2.1."""
        n = self.n + other.n
        if not n:
            return self
        gap = other.mean - self.mean
        mean = self.mean + gap * other.n / n
        return Moments(n, mean, self.squares + other.squares + gap * gap * self.n * other.n / n)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How recorded values of a component become those that are trained. A recorded value is `weight` times the
    function's.
    """

    normalize: Normalize = "none"
    clip: tuple[float, float] | None = None
    weight: float = 1.0  # not 0

    def apply(self, value: float, known: Moments) -> float:
        """w · clip((x / w − μ) / (σ + ε)), x the recorded value, w the weight; without `normalize` w · clip(x / w).

        While σ ≤ ε, so all values were equal, there is no scale, and the score is 0.
        """
        own = value / self.weight
        if self.normalize != "none":
            own = (own - known.mean) / (known.deviation + EPSILON) if known.deviation > EPSILON else 0.0
        if self.clip is not None:
            own = min(max(own, self.clip[0]), self.clip[1])
        return self.weight * own


def scales_of(config: RewardConfig | None) -> dict[str, Scale]:
    """The scales of a run's components."""
    functions = {} if config is None else config.functions
    return {
        name: Scale(normalize=one.normalize, clip=one.clip, weight=one.weight)
        for name, one in functions.items()
        if one.normalize != "none" or one.clip is not None
    }


class Series(NamedTuple):
    """What statistics are of: the source of tasks ("" for all), and the name of rewards."""

    source: str
    name: str


@dataclass(frozen=True, slots=True)
class RewardScaling:
    """The scales of a run's components, and the statistics of the rewards that it has trained. Components without a
    scale are trained as they are recorded.
    """

    scales: Mapping[str, Scale]
    moments: Mapping[Series, Moments] = field(default_factory=dict)

    def with_rewards(self, found: Iterable[tuple[str, str, float]]) -> RewardScaling:
        """With the rewards of one more batch: (source, name, recorded value), in an order that is always the same."""
        moments = dict(self.moments)
        for source, name, value in found:
            component = self._component(name)
            if component is None or self.scales[component].normalize == "none":
                continue
            series = self._series(component, source, name, moments)
            moments[series] = moments.get(series, Moments()).and_value(value / self.scales[component].weight)
        return replace(self, moments=moments)

    def scaled(self, source: str, rewards: SessionRewards) -> SessionRewards:
        """A session's rewards as they are trained. A component scales the rewards of its name, and of `NAME.KEY`."""
        if not any(self._component(name) for name in rewards.named):
            return rewards
        return credit.summed({name: self._of_name(source, name, own) for name, own in rewards.named.items()})

    def _of_name(self, source: str, name: str, own: SessionRewards) -> SessionRewards:
        component = self._component(name)
        if component is None:
            return own
        scale = self.scales[component]
        known = self.moments.get(self._series(component, source, name, self.moments), Moments())
        return SessionRewards(
            session=None if own.session is None else scale.apply(own.session, known),
            branches={call: scale.apply(value, known) for call, value in own.branches.items()},
            calls={call: scale.apply(value, known) for call, value in own.calls.items()},
        )

    def _series(self, component: str, source: str, name: str, moments: Mapping[Series, Moments]) -> Series:
        series = Series(source if self.scales[component].normalize == "running_per_source" else "", name)
        return series if series in moments or len(moments) < MOST_SERIES else Series(OTHERS, component)

    def _component(self, name: str) -> str | None:
        """The component with the longest name that is the reward's name, or its beginning up to a dot."""
        fitting = [one for one in self.scales if name == one or name.startswith(f"{one}.")]
        return max(fitting, key=len, default=None)

    def of_names(self) -> dict[str, Moments]:
        """Name of a reward → its statistics, over all sources."""
        found: dict[str, Moments] = {}
        for series, one in self.moments.items():
            found[series.name] = found.get(series.name, Moments()).and_moments(one)
        return found

    def to_json(self) -> Json:
        """As the store keeps it."""
        scales = {
            name: {"normalize": one.normalize, "clip": one.clip, "weight": one.weight}
            for name, one in self.scales.items()
        }
        return {"scales": scales, "moments": [[*series, *one] for series, one in self.moments.items()]}

    @classmethod
    def from_json(cls, stored: Json) -> RewardScaling:
        """The inverse of `to_json`."""
        scales = {
            name: Scale(normalize=one["normalize"], clip=one["clip"] and tuple(one["clip"]), weight=one["weight"])
            for name, one in stored["scales"].items()
        }
        moments = {Series(source, name): Moments(*rest) for source, name, *rest in stored["moments"]}
        return cls(scales, moments)
