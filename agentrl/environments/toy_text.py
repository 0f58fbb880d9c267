"""Gymnasium's toy text environments, and others with text as `ansi` and a few actions with names.

agent: agentrl.environments.toy_text:ToyText
tasks:
  path: agentrl.environments.toy_text:episodes
  args: {environments: {FrozenLake-v1: {is_slippery: false}, Taxi-v4: }}
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.environments.game_seat import OutOfRoom, Seat
from agentrl.environments.optional_import import library
from agentrl.errors import UserError, did_you_mean
from agentrl.rollout.answering.policy_call import PolicyCall
from agentrl.rollout.score import Result, Reward

SOURCE = "gymnasium"
ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
"""The names of actions 0, 1, …, by environment, as Gymnasium's documentation has them."""
RULES = {
    "FrozenLake": "Walk from S to G over the frozen lake. F is ice, H is a hole. You are on the cell in [brackets].",
    "FrozenLake8x8": "Walk from S to G over the frozen lake. F is ice, H is a hole. You are on the cell in [brackets].",
    "CliffWalking": "Walk from x to T without stepping on the cliff C.",
    "Taxi": "Drive the taxi [ ] to the passenger <X>, pick it up, drive to the destination {X} and drop it off. "
    "[*] is the taxi with the passenger. Walls are |.",
    "Blackjack": "Play Blackjack. You see the sum of your cards, the dealer's card, and 1 if you have a usable ace.",
}
COLOUR = re.compile(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m", re.DOTALL)
MARKS = {"41": "[{}]", "43": "[{}]", "42": "[*]", "34;1": "<{}>", "35": "{{{}}}"}
"""The meaning of a coloured cell, as text: the player or the taxi, the passenger, the destination."""


def episodes(
    environments: str | Sequence[str] | Mapping[str, Any], *, size: int = 4096, seed: int = 0
) -> Iterator[Json]:
    """`size` episodes of the environments in turn, each with a seed of its own. `environments` is an id, a list of ids,
    or ids with the arguments of `gymnasium.make`.
    """
    listed = dict.fromkeys([environments] if isinstance(environments, str) else environments)
    listed |= environments if isinstance(environments, Mapping) else {}
    if not listed:
        raise UserError("tasks.args.environments: names no environment")
    known = library("gymnasium").registry
    for name in listed:
        if name not in known:
            raise UserError(f"tasks.args.environments: Gymnasium has no {name!r}{did_you_mean(name, known)}")
    seeds = random.Random(f"episodes:{seed}")
    for index in range(size):
        name = list(listed)[index % len(listed)]
        yield {
            "environment": name,
            "seed": seeds.getrandbits(31),
            "settings": dict(listed[name] or {}),
            "data_source": name,
        }


class ToyText:
    """Plays an episode, one action an answer; the reward is the sum of the environment's rewards.

    An action is the last of the `actions` that an answer names; an answer without one changes nothing but is a turn.
    The episode ends after `max_turns`, or when the model's context is full. `actions` and `rules` are for environments
    that this module does not know.
    """

    def __init__(
        self,
        *,
        max_turns: int = 50,
        actions: Sequence[str] | None = None,
        rules: str | None = None,
        enable_thinking: bool | None = None,
        max_tokens: int | None = None,
        stop: list[str] | None = None,
    ) -> None:
        if max_turns < 1:
            raise UserError(f"agent_args.max_turns: must be at least 1, got {max_turns}")
        self._max_turns, self._actions, self._rules = max_turns, actions, rules
        self._call = PolicyCall(enable_thinking=enable_thinking, max_tokens=max_tokens, stop=stop)

    async def run(self, data: Json, **extra: Any) -> Result:
        """Play one episode."""
        walk = Walk(data, self._actions)
        rules = RULES.get(walk.kind, "") if self._rules is None else self._rules
        seat = Seat(self._call, extra, f"{rules}\nAnswer with one action: {', '.join(walk.actions)}.".strip())
        shown = walk.shown
        for _ in range(self._max_turns):
            try:
                answer = await seat.move(shown)
            except OutOfRoom:
                break
            shown = walk.step(answer)
            if walk.done:
                break
        walk.close()
        return Result(rewards=(Reward(value=walk.total, source=SOURCE),), truncated=not walk.terminated)


class Walk:
    """An episode of an environment, in text."""

    def __init__(self, data: Json, actions: Sequence[str] | None = None) -> None:
        self.kind = str(data["environment"]).rpartition("/")[2].partition("-v")[0]
        known = tuple(actions or ACTIONS.get(self.kind, ()))
        self._env = _made(data["environment"], data["settings"])
        count = int(getattr(self._env.action_space, "n", 0))
        if not count or len(known) not in (0, count):
            raise UserError(f"{data['environment']}: has {count} actions to choose from, {len(known)} have a name")
        self.actions = known or tuple(map(str, range(count)))
        self._pattern = re.compile(rf"\b({'|'.join(map(re.escape, self.actions))})\b", re.IGNORECASE)
        self._state, _ = self._env.reset(seed=data["seed"])
        self.total, self.done, self.terminated = 0.0, False, False

    @property
    def shown(self) -> str:
        """The state of the game as text, for the player."""
        if self._env.render_mode != "ansi":
            return str(self._state)
        return COLOUR.sub(lambda found: MARKS.get(found[1], "{}").format(found[2]), self._env.render()).strip("\n")

    def step(self, answer: str) -> str:
        """Do what an answer says; returns what the player sees then."""
        named = [found.lower() for found in self._pattern.findall(answer)]
        if not named:
            return f"There is no action in your answer. Choose one of: {', '.join(self.actions)}."
        action = [one.lower() for one in self.actions].index(named[-1])
        self._state, reward, ended, cut, _ = self._env.step(action)
        self.total, self.done, self.terminated = self.total + float(reward), bool(ended or cut), bool(ended)
        return self.shown

    def close(self) -> None:
        """Free the environment."""
        self._env.close()


def _made(name: str, settings: Json) -> Any:
    gym = library("gymnasium")
    made = gym.make(name, **settings)
    if "render_mode" in settings or "ansi" not in made.metadata.get("render_modes", ()):
        return made
    made.close()
    return gym.make(name, **settings, render_mode="ansi")
