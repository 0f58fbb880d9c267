"""What a workflow may ask about the episode that it runs, or use in it.

workflow_context.get()                       its group, and whether it is an evaluation
workflow_context.stat_scope()                `rollout` or `eval-rollout`
await workflow_context.get_httpx_client()    an HTTP client for other servers
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.domain.session_stats import EVALUATION, ROLLOUT
from agentrl.errors import UserError

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True)
class WorkflowContext:
    """The episode's facts. `task_id` is the id of its group; None outside of an episode."""

    is_eval: bool = False
    task_id: str | None = None


class EpisodeClient:
    """The HTTP client of one episode, made when the workflow asks for it; a new one if the workflow closed it."""

    def __init__(self, timeout: httpx.Timeout) -> None:
        self._timeout = timeout
        self._client: httpx.AsyncClient | None = None

    def get(self) -> httpx.AsyncClient:
        """An open client."""
        import httpx

        if self._client is None or self._client.is_closed:
            self._client = httpx.AsyncClient(timeout=self._timeout)
        return self._client

    async def close(self) -> None:
        """Close the client, if there is one."""
        if self._client is not None:
            await self._client.aclose()


OUTSIDE = WorkflowContext()
_current: ContextVar[WorkflowContext] = ContextVar("workflow_context", default=OUTSIDE)
_client: ContextVar[EpisodeClient | None] = ContextVar("workflow_client", default=None)


def get() -> WorkflowContext:
    """The context of the running episode."""
    return _current.get()


def set(context: WorkflowContext) -> None:
    """Set the context of the running episode. Other episodes keep theirs."""
    _current.set(context)


def stat_scope() -> str:
    """`eval-rollout` in an evaluation, else `rollout`."""
    return EVALUATION if get().is_eval else ROLLOUT


async def get_httpx_client() -> httpx.AsyncClient:
    """The episode's own HTTP client for servers other than the engine, with the time-out of the run's calls.

    It is closed at the episode's end. Raises UserError outside of an episode.
    """
    client = _client.get()
    if client is None:
        raise UserError("get_httpx_client: no workflow's episode is running here")
    return client.get()


@asynccontextmanager
async def http_client(timeout: httpx.Timeout) -> AsyncIterator[None]:
    """Give the running episode an HTTP client until the block ends."""
    client = EpisodeClient(timeout)
    token = _client.set(client)
    try:
        yield
    finally:
        _client.reset(token)
        await client.close()
