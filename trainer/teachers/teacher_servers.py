"""Teachers that are SGLang servers: the trainer has them score what the policy sampled, and keeps the numbers.

    this rank's trajectories ─┬─ scored before: the numbers in the store
                              └─ new: POST /generate, several at once, with retries ─► all ranks ─► rank 0 keeps them

The numbers are in the store before a step learns from them, so a step that is repeated reads the same ones. Of ranks
that share their trajectories the first asks. T': tokens that the teacher reads.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import aiohttp
import numpy as np

from agentrl.configs.episodes.teachers import UPSTREAM, TeacherServerConfig
from agentrl.configs.proxy_config import UpstreamConfig
from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Float32, TrajectoryTokens
from agentrl.engine.sglang.sglang_scoring import Scored, SGLangScoring
from agentrl.errors import AgentRLError, EngineError, EngineKeyRefused, EngineRejected, UserError, root_cause
from agentrl.models.same_tokens import check_same_texts, check_same_tokens
from agentrl.trainer.distributed import World
from agentrl.trainer.run_lineage import Lineage
from agentrl.trainer.teachers.lessons import first_sampled

T = TypeVar("T")

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
RETRIED = (408, 429)
"""Statuses below 500 after which a request is sent again."""


class TeacherServers:
    """The servers among a run's teachers."""

    def __init__(
        self, teachers: Sequence[str], config: RunConfig, student: Path, world: World, lineage: Lineage
    ) -> None:
        """Collective. Raises UserError for a server that does not answer, or has another tokenizer than `student`."""
        self._addresses = {teacher: address_of(teacher, config.proxy.upstreams) for teacher in teachers}
        self._settings, self._student = config.trainer.teacher_server, student
        self._world, self._lineage = world, lineage
        self._known_texts: set[str] = set()  # servers whose texts were compared with the student's
        world.from_leader(lambda: [asyncio.run(self._check(teacher)) for teacher in teachers])

    def logprobs(self, teacher: str, read: Sequence[TrajectoryTokens]) -> list[Float32]:
        """(T',) the server's logprobs at sampled tokens, 0 elsewhere. Collective. Raises UserError for tokens that it
        cannot score, and when it does not answer.
        """
        wanted = sorted(set().union(*self._world.everyones([one.trajectory_id for one in read])))
        known = self._world.share(self._lineage.teacher_logprobs(teacher, wanted))
        missing = [one for one in read if one.trajectory_id not in known] if self._world.counts else []
        new: dict[str, Float32] = {}
        problem: str | None = None
        for theirs, error in self._world.everyones_from(lambda: self._asked(teacher, read, missing)):
            new |= theirs
            problem = problem or error
        self._world.from_leader(lambda: self._lineage.keep_teacher_logprobs(teacher, new))
        if problem is not None:
            raise UserError(problem)
        scored = known | new
        return self._world.together(lambda: [spread(teacher, scored[one.trajectory_id], one) for one in read])

    def _asked(
        self, teacher: str, read: Sequence[TrajectoryTokens], missing: Sequence[TrajectoryTokens]
    ) -> tuple[dict[str, Float32], str | None]:
        """Trajectory → logprobs of those that are `missing`, and the problem of this rank, which all of them raise."""
        try:
            for one in read:
                check_temperature(teacher, one)
            return asyncio.run(self._ask(teacher, missing)), None
        except AgentRLError as error:
            return {}, str(error)
        except ExceptionGroup as errors:
            cause = root_cause(errors)
            if not isinstance(cause, AgentRLError):
                raise cause from errors
            return {}, str(cause)

    async def _ask(self, teacher: str, read: Sequence[TrajectoryTokens]) -> dict[str, Float32]:
        """Trajectory → (number of sampled tokens,) logprobs."""
        if not read:
            return {}
        free = asyncio.Semaphore(self._settings.concurrent)

        async def score(server: SGLangScoring, one: TrajectoryTokens) -> Float32:
            async with free:
                return await self._score(teacher, server, one)

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=self._settings.concurrent)) as http:
            server = self._server(teacher, http)
            first = await score(server, read[0])  # a server with another tokenizer is found before all are asked
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(score(server, one)) for one in read[1:]]
            found = [first, *(task.result() for task in tasks)]
        return {one.trajectory_id: logprobs for one, logprobs in zip(read, found, strict=True)}

    async def _score(self, teacher: str, server: SGLangScoring, one: TrajectoryTokens) -> Float32:
        start, compare = first_sampled(one), teacher not in self._known_texts

        async def ask() -> Scored:
            return await server.score(one.input_ids, start, self._settings.timeout_s, texts=compare)

        scored = await again(ask, self._settings, f"trajectory {one.trajectory_id}: {teacher}")
        if scored.texts is not None:
            check_same_texts(self._student, teacher, one.input_ids[start:].tolist(), scored.texts)
            self._known_texts.add(teacher)
        return scored.logprobs[one.turn_ids[start:] >= 0]

    async def _check(self, teacher: str) -> None:
        """Compare tokenizers, where the server's model is a folder on this machine."""
        async with aiohttp.ClientSession() as http:
            server = self._server(teacher, http)
            path = await again(lambda: server.model_path(self._settings.timeout_s), self._settings, teacher)
        if (folder := Path(path)).is_dir():
            check_same_tokens(self._student, folder)

    def _server(self, teacher: str, http: aiohttp.ClientSession) -> SGLangScoring:
        url, key = self._addresses[teacher]
        return SGLangScoring(url, http, key=key)


async def again(ask: Callable[[], Awaitable[T]], settings: TeacherServerConfig, what: str) -> T:
    """The result of a request, sent again while the server does not answer or answers that it cannot now. Raises
    UserError with the last reason.
    """
    wait_s = FIRST_WAIT_S
    for left in range(settings.attempts - 1, -1, -1):
        try:
            return await ask()
        except EngineError as error:
            final = isinstance(error, EngineKeyRefused) or (
                isinstance(error, EngineRejected) and error.status not in RETRIED
            )
            if final or not left:
                raise UserError(f"trainer.teacher: {what}: {error}") from error
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    raise AssertionError("there is at least one attempt")


def address_of(teacher: str, upstreams: Mapping[str, UpstreamConfig]) -> tuple[str, str | None]:
    """A server's URL without `/v1`, and its key. Raises UserError for an environment variable without a key."""
    if not teacher.startswith(UPSTREAM):
        return teacher.removesuffix("/v1"), None
    upstream = upstreams[teacher.removeprefix(UPSTREAM)]
    url = upstream.base_url.removesuffix("/v1")
    if upstream.api_key_env is None:
        return url, None
    key = os.environ.get(upstream.api_key_env, "").strip()
    if not key:
        raise UserError(
            f"trainer.teacher: {teacher}: the environment variable {upstream.api_key_env} holds no key in the trainer"
        )
    return url, key


def check_temperature(teacher: str, one: TrajectoryTokens) -> None:
    """Raise UserError for tokens that were sampled at another temperature than 1: a server scores at 1 only."""
    other = one.temperatures[one.loss_mask & (one.temperatures != 1)]
    if len(other):
        raise UserError(
            f"trainer.teacher: trajectory {one.trajectory_id} was sampled at temperature {other[0]:g}, and {teacher} "
            "scores at temperature 1 only: sample at 1 (rollout.sampling.temperature), or give a model folder"
        )


def spread(teacher: str, sampled: Float32, one: TrajectoryTokens) -> Float32:
    """(T',) logprobs of the sampled tokens in their places, 0 elsewhere."""
    where = one.turn_ids >= 0
    if len(sampled) != int(where.sum()):
        raise UserError(
            f"trainer.teacher: {teacher}: {len(sampled)} recorded logprobs of the {int(where.sum())} sampled tokens of "
            f"trajectory {one.trajectory_id}"
        )
    found = np.zeros(one.length, np.float32)
    found[where] = sampled
    return found
