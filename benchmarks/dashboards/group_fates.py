"""Decides what happens in each session of a planned group: whether it completes, what it earns, how long it takes."""

from __future__ import annotations

import math
import random

from agentrl.domain import evaluation
from agentrl.domain.evaluation import Label
from agentrl.domain.schemas import Json

from .episode_templates import Template
from .episode_texts import SOURCES, sentence
from .group_plans import GROUP, SETTINGS, GroupPlan
from .run_timeline import Timeline
from .session_rows import SECOND_REWARD, Episode

FAILED, ABANDONED, UNREWARDED, REJECTED, CLOSING = 0.03, 0.015, 0.01, 0.01, 0.1
"""Shares of sessions that fail, whose client goes silent, without a reward, that their agent rejects; of the sessions
of a running group that have ended and are not built."""


class Fates:
    """Draws the episodes of groups, in order."""

    def __init__(self, seed: int, timeline: Timeline, templates: list[Template]) -> None:
        self._rng = random.Random(f"{seed}/fates")
        self._seed, self._timeline, self._templates = seed, timeline, templates

    def training(self, plan: GroupPlan, task: Json) -> list[Episode]:
        """The episodes of a training group. The first one completes, and takes the group's whole time."""
        chance = self._chance(task, plan.begin)
        if plan.reason == "too easy":
            chance = 1.0
        tied = plan.state == "stale" and plan.reason == "tied"
        won = self._rng.random() < chance
        return [
            self._session(plan, index, task["prompt"], won if tied else self._rng.random() < chance, not tied)
            for index in range(GROUP)
        ]

    def evaluation(self, plan: GroupPlan) -> list[Episode]:
        """The one episode of an evaluation."""
        assert plan.evaluation is not None
        rng = self._rng
        step, episodes, setting, index = plan.evaluation
        source = list(SOURCES)[index % len(SOURCES)]
        label = Label(step, step, evaluation.Episode(setting, index, 0), episodes, source)
        chance = self._chance({"id": f"held-out-{index}"}, plan.begin)
        return [
            Episode(
                status="completed",
                template=rng.choice(self._templates),
                begin=plan.begin,
                end=plan.end,
                prompt=f"Held-out task {index}: {sentence(rng, 12)}?",
                reward=float(rng.random() < chance),
                label=label,
                temperature=SETTINGS[setting],
            )
        ]

    def _chance(self, task: Json, at: float) -> float:
        """How likely the policy of a time solves a task: some tasks are never solved."""
        difficulty = random.Random(f"{self._seed}/{task['id']}").gauss(0.5, 2.0)
        if difficulty > 3.0:
            return 0.0
        done = (at - self._timeline.start) / (self._timeline.now - self._timeline.start)
        return 1 / (1 + math.exp(difficulty - 3.0 * done))

    def _session(self, plan: GroupPlan, index: int, prompt: str, won: bool, format_rewards: bool) -> Episode:
        rng, now = self._rng, self._timeline.now
        begin, end = plan.begin, plan.end
        if index:
            begin += 0.02 * rng.random() * (plan.end - plan.begin)
            end = begin + (plan.end - begin) * rng.uniform(0.4, 1.0)
        status, draw = "completed", rng.random()
        if plan.state == "running" and index and draw < CLOSING:
            status, end = "closing", min(end, now)
        elif plan.state == "running" and end > now:
            status = "open"
        elif plan.state == "rejected" and plan.reason is None and index:
            status = "failed" if draw < 0.7 else "abandoned"
        elif index and draw < FAILED + ABANDONED:
            status = "failed" if draw < FAILED else "abandoned"
        return Episode(
            status=status,
            template=rng.choice(self._templates),
            begin=begin,
            end=end,
            prompt=prompt,
            cut=rng.random() if status in ("failed", "abandoned") else 1.0,
            reward=None if index and rng.random() < UNREWARDED else float(won),
            format_reward=format_rewards and rng.random() < SECOND_REWARD,
            rejected=index > 0 and status == "completed" and rng.random() < REJECTED,
        )
