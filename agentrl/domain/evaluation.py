"""Evaluations, for the workers that run them and the store that reads them: schedule, episodes, results.

An evaluation measures one weight version, which a step of the surviving lineage made. A step that was rolled back and
trained again made another version, which is evaluated anew. An evaluation has an episode for each sample of each task
in each setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Self

from agentrl.domain import intervals, sample_metrics
from agentrl.domain.sample_metrics import Scored
from agentrl.domain.schemas import Json, SessionStatus
from agentrl.domain.session_stats import frequent_means
from agentrl.domain.ties import TIE

ATTEMPTS = 3
"""Attempts per sample of a task. After this many failures by agent or policy the sample counts as reward 0; after this
many faults it is left out."""
KEY = "evaluation"
"""The key in a session's metadata of the evaluation episode that the session runs."""


def schedule(every: int | None, steps: int) -> list[int]:
    """The steps after which a run is evaluated, in order; 0 is before the first."""
    return sorted({0, *(range(every, steps, every) if every else ()), steps})


def newest_due(every: int | None, steps: int, published_step: int) -> int | None:
    """The newest step that is due for evaluation. None if only the base weights were due and training has gone on."""
    due = [step for step in schedule(every, steps) if step <= published_step][-1]
    return None if due == 0 < published_step else due


@dataclass(frozen=True, slots=True)
class Episode:
    """One sample of one task in one setting."""

    setting: str
    index: int  # of the task
    sample: int

    def claim(self, version: int, attempt: int) -> str:
        """The name of one attempt. The worker that claims it runs the attempt."""
        return f"evaluation {version} {self.setting} {self.index} {self.sample} {attempt}"


@dataclass(frozen=True, slots=True)
class Label:
    """The evaluation and the episode that a session belongs to, as its metadata names them."""

    step: int
    version: int
    episode: Episode
    episodes: int  # of the whole evaluation
    source: str | None = None  # of the task, in an evaluation of several sources

    @property
    def metadata(self) -> Json:
        """The metadata of the session."""
        of = {"step": self.step, "version": self.version, **asdict(self.episode), "episodes": self.episodes}
        return {KEY: of if self.source is None else {**of, "source": self.source}}

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Self | None:
        """The label in a session's metadata; None for evaluation sessions that a program started on its own."""
        found: Any = metadata.get(KEY)
        match found:
            case {
                "step": int(step),
                "version": int(version),
                "setting": str(setting),
                "index": int(index),
                "sample": int(sample),
                "episodes": int(episodes),
            }:
                source = found.get("source")
                return cls(
                    step,
                    version,
                    Episode(setting, index, sample),
                    episodes,
                    source if isinstance(source, str) else None,
                )
        return None


@dataclass(slots=True)
class Tries:
    """The ended sessions of one episode."""

    reward: float | None = None  # of the completed session
    answer: str | None = None  # of the completed session
    scored: Scored | None = None  # of the completed session, where samples are chosen by a score
    failed: int = 0  # sessions that failed although every call was answered
    faults: int = 0  # sessions that failed before any call, or with a call that was not answered
    abandoned: int = 0  # sessions whose worker died or was stopped

    @property
    def over(self) -> bool:
        """Whether the episode needs no further attempt."""
        return self.reward is not None or self.failed >= ATTEMPTS or self.faults >= ATTEMPTS

    @property
    def ended(self) -> int:
        """The number of ended sessions without a result."""
        return self.failed + self.faults + self.abandoned

    @property
    def result(self) -> float | None:
        """The reward that counts for an ended episode; None: the episode is left out."""
        return 0.0 if self.reward is None and self.failed >= ATTEMPTS else self.reward


def tries(rows: Iterable[Json]) -> dict[Episode, Tries]:
    """The tries of each episode, from rows of one evaluation: `{"evaluation", "status", "fault", "reward"}`, and
    `answer` and `best_of` (`{"score", "reward"}`) if there are.
    """
    found: dict[Episode, Tries] = {}
    for row in rows:
        label = Label.of(row)
        assert label is not None
        of_episode = found.setdefault(label.episode, Tries())
        if row["status"] == SessionStatus.COMPLETED:
            if of_episode.reward is None:
                of_episode.reward, of_episode.answer = row["reward"], row.get("answer")
                if (found_best := row.get("best_of")) is not None:
                    of_episode.scored = Scored(found_best["score"], found_best["reward"])
        elif row["status"] == SessionStatus.FAILED:
            of_episode.faults += row["fault"]
            of_episode.failed += not row["fault"]
        else:
            of_episode.abandoned += 1
    return found


@dataclass(slots=True)
class Result:
    """The results of one setting of an evaluation."""

    rewards: dict[int, list[float]] = field(default_factory=dict)  # task → rewards of its samples
    failed: int = 0  # how many of these rewards are 0 because the episode failed ATTEMPTS times
    versions: list[int] = field(default_factory=list)  # versions that sampled it, unordered
    faults: int = 0  # samples that are left out after ATTEMPTS faults
    stats: dict[str, list[float]] = field(default_factory=dict)  # name → the values of the completed sessions
    sources: dict[int, str] = field(default_factory=dict)  # task → its source, in an evaluation of several sources
    answers: dict[int, list[str | None]] = field(default_factory=dict)  # task → answers of its samples, as `rewards`
    choices: dict[int, list[Scored]] = field(default_factory=dict)  # task → scores of its samples, as `rewards`

    def as_json(self) -> Json:
        """The mean reward with its interval (null if all samples are left out), and the counts behind it."""
        names = sorted({self.sources[task] for task in self.rewards if task in self.sources})
        by_source = {name: [task for task in self.rewards if self.sources.get(task) == name] for name in names}
        return {
            **self._figures(list(self.rewards)),
            **({"sources": {name: self._figures(of) for name, of in by_source.items()}} if by_source else {}),
            "failed": self.failed,
            "faults": self.faults,
            "version_min": min(self.versions, default=None),
            "version_max": max(self.versions, default=None),
            **({"stats": frequent_means(self.stats)} if self.stats else {}),
        }

    def _figures(self, tasks: list[int]) -> Json:
        """The mean reward of these tasks with its interval, and the counts behind it."""
        rewards = [self.rewards[task] for task in tasks]
        answers = [self.answers.get(task, [None] * len(self.rewards[task])) for task in tasks]
        choices = [self.choices.get(task, [Scored(None, 0.0)] * len(self.rewards[task])) for task in tasks]
        mean = intervals.of_rewards(rewards) if rewards else None
        return {
            "reward": mean and mean.mean,
            "low": mean and mean.low,
            "high": mean and mean.high,
            "perfect": mean and fmean(fmean(r >= 1.0 - TIE for r in samples) for samples in rewards),
            "tasks": len(rewards),
            "episodes": sum(map(len, rewards)),
            **({"samples": found} if (found := sample_metrics.of_tasks(rewards, answers, choices)) else {}),
        }


@dataclass(slots=True)
class Evaluation:
    """The results of one evaluation so far, without the episodes that have not ended."""

    step: int
    version: int
    episodes: int
    settings: dict[str, Result] = field(default_factory=dict)

    @property
    def ended(self) -> int:
        """How many episodes are over."""
        found = self.settings.values()
        return sum(r.faults + sum(map(len, r.rewards.values())) for r in found)

    @property
    def complete(self) -> bool:
        """Whether all episodes are over."""
        return self.ended >= self.episodes

    def as_json(self) -> Json:
        """The results for REST, the screen and the summary."""
        return {
            "step": self.step,
            "version": self.version,
            "complete": self.complete,
            "episodes": self.episodes,
            "ended": self.ended,
            "settings": {name: result.as_json() for name, result in sorted(self.settings.items())},
        }


def collect(rows: Iterable[Json]) -> list[Evaluation]:
    """Evaluations by version, from rows of sessions as `store.evaluation_episodes` reads them."""
    by_version: dict[int, list[Json]] = {}
    totals: dict[int, Label] = {}
    for row in rows:
        if (label := Label.of(row)) is not None:
            by_version.setdefault(label.version, []).append(row)
            totals[label.version] = label
    return [_evaluation(totals[version], by_version[version]) for version in sorted(by_version)]


def _evaluation(label: Label, rows: list[Json]) -> Evaluation:
    found = Evaluation(label.step, label.version, label.episodes)
    for episode, of_episode in sorted(tries(rows).items(), key=lambda item: (item[0].index, item[0].sample)):
        if of_episode.over:
            result = found.settings.setdefault(episode.setting, Result())
            if of_episode.result is None:
                result.faults += 1
            else:
                result.rewards.setdefault(episode.index, []).append(of_episode.result)
                result.answers.setdefault(episode.index, []).append(of_episode.answer)
                result.choices.setdefault(episode.index, []).append(of_episode.scored or Scored(None, 0.0))
                result.failed += of_episode.reward is None
    for row in rows:
        of_row = Label.of(row)
        assert of_row is not None
        if row["status"] == SessionStatus.COMPLETED and row["version_min"] is not None:
            found.settings[of_row.episode.setting].versions += [row["version_min"], row["version_max"]]
        if row["status"] == SessionStatus.COMPLETED:
            for name, value in row.get("stats", {}).items():
                found.settings[of_row.episode.setting].stats.setdefault(name, []).append(value)
        if of_row.source is not None and of_row.episode.setting in found.settings:
            found.settings[of_row.episode.setting].sources[of_row.episode.index] = of_row.source
    return found


def gains(before: Evaluation, after: Evaluation) -> Json:
    """Setting → the mean gain of its tasks, paired by task, with an interval."""
    common = {name: (before.settings[name], after.settings[name]) for name in before.settings if name in after.settings}
    paired = {name: intervals.of_gain(old.rewards, new.rewards) for name, (old, new) in sorted(common.items())}
    return {name: {"reward": g.mean, "low": g.low, "high": g.high} for name, g in paired.items() if g is not None}


def figure(found: Json, form: str = ".3f") -> str:
    """A mean with its interval, for people."""
    if found["reward"] is None:
        return "no result"
    around = "" if found["low"] is None else f" [{found['low']:{form}}, {found['high']:{form}}]"
    return f"{found['reward']:{form}}{around}"


def _of_samples(found: Json) -> str:
    """pass@k, maj@k and best_of@k for the largest k, where tasks have several samples."""
    figures = [
        (kind, *list(found["samples"][kind].items())[-1])
        for kind in ("pass", "maj", "best_of")
        if kind in found.get("samples", {})
    ]
    return "".join(f", {kind}@{k} {value:.3f}" for kind, k, value in figures)


def _by_source(found: Json) -> str:
    """The means of a setting's sources, in parentheses, if there are several."""
    if "sources" not in found:
        return ""
    return f" ({', '.join(f'{name} {figure(of_source)}' for name, of_source in found['sources'].items())})"


def line(found: Json) -> str:
    """An evaluation (`Evaluation.as_json`) as a line for people: its progress, or its results when it is complete."""
    if not found["complete"]:
        return f"evaluation of step {found['step']}: {found['ended']} of {found['episodes']} episodes"
    of_settings = found["settings"]
    parts = [
        f"{name} {figure(of_setting)}{_of_samples(of_setting)}{_by_source(of_setting)}"
        for name, of_setting in of_settings.items()
    ]
    if failed := sum(of_setting["failed"] for of_setting in of_settings.values()):
        parts.append(f"{failed} episodes failed")
    if faults := sum(of_setting["faults"] for of_setting in of_settings.values()):
        parts.append(f"{faults} episodes without a result: the policy did not answer")
    low = min(
        (s["version_min"] for s in of_settings.values() if s["version_min"] is not None), default=found["version"]
    )
    high = max((s["version_max"] for s in of_settings.values() if s["version_max"] is not None), default=low)
    parts.append(f"version {low}" if low == high else f"versions {low} to {high}")
    return f"evaluation of step {found['step']}: {', '.join(parts)}"
