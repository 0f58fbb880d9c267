"""TextArena: one trajectory for each player of a game, with the library's rewards.

agent: agentrl.environments.text_games:TextArena
tasks:
  path: agentrl.environments.text_games:games
  args: {games: [TicTacToe-v0, GuessTheNumber-v0]}

main session ── a seat by lot ──┐
sub-agent's session ── seat ────┼──► env.step(text) ──► rewards, one for each session
sub-agent's session ── seat ────┘
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from agentrl.client import AsyncClient, AsyncSession
from agentrl.domain.schemas import Json
from agentrl.environments.game_seat import OutOfRoom, Seat
from agentrl.environments.optional_import import library
from agentrl.environments.random_state import RandomState
from agentrl.errors import UserError, did_you_mean
from agentrl.rollout.answering.policy_call import PolicyCall
from agentrl.rollout.score import Result, Reward

RAW = "-raw"
"""The ids without wrappers, whose observations are what is new since the player's last move."""
SELF = "self"
SOURCE = "textarena"
NUMBERS_OF_PLAYERS: tuple[int, ...] = (2, 1, *range(3, 16))
PROBE_SEED = 0


def games(
    games: str | Sequence[str] | Mapping[str, Any], *, size: int = 4096, seed: int = 0, players: int | None = None
) -> Iterator[Json]:
    """`size` games in turn, each with a seed of its own. `games` is an id, a list of ids, or ids with the library's
    settings of them. `players` is their number of players; None: the smallest that the game takes, two before one.
    """
    listed: dict[str, Any] = dict.fromkeys([games] if isinstance(games, str) else games)
    listed |= games if isinstance(games, Mapping) else {}
    ids = {raw_id(name): dict(settings or {}) for name, settings in listed.items()}
    if not ids:
        raise UserError("tasks.args.games: names no game")
    numbers = {name: players or number_of_players(name, settings) for name, settings in ids.items()}
    seeds = random.Random(f"games:{seed}")
    for index in range(size):
        name = list(ids)[index % len(ids)]
        yield {
            "game": name,
            "seed": seeds.getrandbits(31),
            "players": numbers[name],
            "settings": ids[name],
            "data_source": name.removesuffix(RAW),
        }


def raw_id(name: str) -> str:
    """The id of a game without wrappers. Raises UserError for a game that the library does not have."""
    known = library("textarena.envs.registration").ENV_REGISTRY
    found = name if name.endswith(RAW) else name + RAW
    if found not in known:
        raise UserError(f"tasks.args.games: TextArena has no {name!r}{did_you_mean(found, known)}")
    return found


def number_of_players(name: str, settings: Json) -> int:
    """The first number of NUMBERS_OF_PLAYERS that a game takes. Raises UserError if it cannot be made."""
    refusal: Exception | None = None
    for number in NUMBERS_OF_PLAYERS:
        try:
            Game(name, settings, number, PROBE_SEED)
        except Exception as error:  # noqa: BLE001 - games refuse numbers by whatever their code raises
            refusal = refusal or error
        else:
            return number
    raise UserError(f"tasks.args.games: {name} cannot be started: {refusal!r}") from refusal


def seat_by_lot(base_url: str, players: int) -> int:
    """The seat of the session that has this address."""
    chosen: int = random.Random(base_url.partition("/sessions/")[2]).randrange(players)
    return chosen


class Game:
    """A started game, with random numbers of its own."""

    def __init__(self, name: str, settings: Json, players: int, seed: int) -> None:
        self._random = RandomState(seed)
        with self._random.active():
            self._env = library("textarena").make(name, **settings)
            self._env.reset(num_players=players, seed=seed)
        self.done = False

    def observation(self) -> tuple[int, str]:
        """The player whose move it is, and what is new to it."""
        with self._random.active():
            player, messages = self._env.get_observation()
        names = self._env.state.role_mapping
        told = [text if sender < 0 else f"[{names[sender]}] {text}" for sender, text, _ in messages if sender != player]
        return player, "\n".join(told) or "It is your turn."

    def step(self, text: str) -> None:
        """Make a move."""
        with self._random.active():
            self.done, _ = self._env.step(text)

    def rewards(self) -> dict[int, float]:
        """The library's reward of each player, after the end."""
        rewards, _ = self._env.close()
        return {int(player): float(value) for player, value in rewards.items()}


class TextArena:
    """Plays games of TextArena. The episode's session plays one seat, chosen by lot.

    `opponent` plays the others: with `self` the policy, each seat in a sub-agent's session with the reward of that
    seat; with the name of an upstream that model, whose calls are not trained. A game of more than `max_moves` moves,
    or longer than the model's context, is rejected with that reason.
    """

    def __init__(
        self,
        *,
        opponent: str = SELF,
        max_moves: int = 200,
        system: str | None = None,
        enable_thinking: bool | None = None,
        max_tokens: int | None = None,
        stop: list[str] | None = None,
    ) -> None:
        if max_moves < 1:
            raise UserError(f"agent_args.max_moves: must be at least 1, got {max_moves}")
        self._opponent, self._max_moves, self._system = opponent, max_moves, system
        self._call = PolicyCall(enable_thinking=enable_thinking, max_tokens=max_tokens, stop=stop)
        self._other = self._call if opponent == SELF else PolicyCall(max_tokens=max_tokens, stop=stop, model=opponent)

    async def run(self, data: Json, **extra: Any) -> Result:
        """Play one game."""
        players = int(data["players"])
        ours = seat_by_lot(str(extra["base_url"]), players)
        game = Game(data["game"], data["settings"], players, data["seed"])
        async with AsyncExitStack() as stack:
            others = await self._others([player for player in range(players) if player != ours], data, extra, stack)
            seats = {ours: Seat(self._call, extra, self._system)}
            for player, session in others.items():
                at = extra | ({} if session is None else {"base_url": session.base_url, "api_key": session.api_key})
                seats[player] = Seat(self._other, at, self._system)
            if (reason := await self._play(game, seats)) is not None:
                return Result(reject=reason)
            rewards = game.rewards()
            for player, session in others.items():
                if session is not None:
                    await session.reward(rewards[player], source=SOURCE)
        return Result(rewards=(Reward(value=rewards[ours], source=SOURCE),))

    async def _others(
        self, players: Sequence[int], data: Json, extra: Json, stack: AsyncExitStack
    ) -> dict[int, AsyncSession | None]:
        """The sessions of the other seats, until the block ends; None: the seat is an upstream's."""
        if self._opponent != SELF or not players:
            return dict.fromkeys(players)
        client = await stack.enter_async_context(AsyncClient(extra["base_url"], extra["api_key"]))
        opened = {player: client.session(metadata={"game": data["game"], "player": player}) for player in players}
        return {player: await stack.enter_async_context(session) for player, session in opened.items()}

    async def _play(self, game: Game, seats: Mapping[int, Seat]) -> str | None:
        """Move in turn until the game ends; the reason why it did not."""
        for _ in range(self._max_moves):
            player, observation = game.observation()
            try:
                text = await seats[player].move(observation)
            except OutOfRoom:
                return "the game is longer than the model's context"
            game.step(text)
            if game.done:
                return None
        return f"the game did not end within {self._max_moves} moves"
