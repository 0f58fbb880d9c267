"""`AsyncRewardWrapper(function)`: calls a blocking reward function in another process, with a time-out and retries.

The processes are those of the reward pool (`reward_pool.py`). A rollout worker ends them with `pools_closed`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from agentrl.configs.episodes.reward_config import SINGLE, RewardConfig
from agentrl.errors import UserError
from agentrl.rollout.rewards.answer_scorer import RewardFailed
from agentrl.rollout.rewards.reward_pool import RewardPool
from agentrl.rollout.rewards.reward_process import CallFailed
from agentrl.user_code import load_object

_pools: dict[tuple[str, int], asyncio.Task[RewardPool]] = {}
"""Pools by function and number of processes: wrappers that are made anew for each episode share one."""


class NamedFunction:
    """The function that a process of the pool runs, by its name, with any arguments."""

    def __init__(self, name: str) -> None:
        self._function = load_object(name, "AsyncRewardWrapper")

    def __call__(self, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Call it."""
        return self._function(*arguments, **keywords)


class AsyncRewardWrapper:
    """An awaitable reward function. `reward_fn` must be importable by its name (`module.function`), and its arguments
    must be JSON. `max_workers` processes run it.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        timeout_seconds: float = 15.0,
        max_workers: int | None = None,
        max_retries: int = 3,
    ) -> None:
        module, name = getattr(reward_fn, "__module__", ""), getattr(reward_fn, "__qualname__", "")
        if not module or not name or "<" in name or "." in name:
            raise UserError(f"AsyncRewardWrapper: {reward_fn!r} must be a function at the top of a module")
        self._name, self._timeout_s, self._retries = f"{module}:{name}", timeout_seconds, max_retries
        self._processes = max_workers or 1

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. Raises RewardFailed when all attempts failed, so that the session fails."""
        pool = await self._pool()
        answer = {"task": {"arguments": args, "keywords": kwargs}, "messages": [], "completion": ""}
        attempt = 0
        while True:
            attempt += 1
            try:
                return (await pool.call(SINGLE, [answer], self._timeout_s))["values"][0]
            except CallFailed as error:
                if attempt > self._retries or error.final:
                    raise RewardFailed(f"{self._name}: {error} (attempt {attempt})") from None

    async def _pool(self) -> RewardPool:
        key = (self._name, self._processes)
        if key not in _pools:
            function = f"{__name__}:{NamedFunction.__name__}"
            config = RewardConfig(function=function, args={"name": self._name}, processes=self._processes)
            _pools[key] = asyncio.create_task(RewardPool(config, "AsyncRewardWrapper").__aenter__())
        return await asyncio.shield(_pools[key])


@asynccontextmanager
async def pools_closed() -> AsyncIterator[None]:
    """End the processes of all wrappers when the block ends."""
    try:
        yield
    finally:
        while _pools:
            _, opening = _pools.popitem()
            await (await opening).__aexit__(None, None, None)
