"""Runs training groups from the proxy until the run is finished.

    proxy ── POST /groups ──► runner ── one task per session ──► agent.run() ── OpenAI calls ──► proxy
      ▲   429: wait (admission)   │                                                │
      └───────────────────────────┴──────────── reward, end ◄──────────────────────┘

The runner waits for admission while the policy is too far behind, for `max_concurrent_groups` while enough groups run,
and for a restarting proxy. All of its state is in the proxy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from agentrl.client import AsyncClient
from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.rollout.agent import Agent
from agentrl.rollout.episode import Outcome, Places, play
from agentrl.rollout.group_filter import Accept, GroupVerdict
from agentrl.rollout.http import AgentHttp
from agentrl.rollout.pace import Pace, check
from agentrl.rollout.worker_display import Progress

POLL_S = 0.5
FOREVER_S = 10.0**9


async def run_groups(
    client: AsyncClient,
    agent: Agent | Places,
    *,
    http: AgentHttp,
    timeout_s: float,
    max_concurrent_groups: int,
    owner: str,
    progress: Progress,
    accept: Accept | None = None,
) -> None:
    """Run groups until the run is finished and its last step is published.

    Raises RunFailed, in an exception group, when the run has failed.
    """
    free, pace = asyncio.Semaphore(max_concurrent_groups), Pace(progress)
    async with asyncio.TaskGroup() as playing:
        while (group := await _next_group(client, owner, free, pace, progress)) is not None:
            episode = partial(play, client, agent, http=http, timeout_s=timeout_s, is_eval=False)
            playing.create_task(_play_group(episode, group, free, pace, progress, accept))
    progress.waiting_for = None


async def _next_group(
    client: AsyncClient, owner: str, free: asyncio.Semaphore, pace: Pace, progress: Progress
) -> Json | None:
    """Acquire a slot of `free` and return the next group; None at the end of the run."""
    progress.waiting_for = "running groups to end" if free.locked() else None
    await free.acquire()
    await pace.wait()
    while True:
        progress.waiting_for = progress.waiting_for or "admission"
        try:
            group = await client.request("POST", "/groups", {"is_eval": False, "owner": owner}, timeout_s=FOREVER_S)
        except RequestError as refused:
            check(refused)
            if not refused.code.startswith("run_"):  # run_finished, run_paused, run_stopping
                free.release()
                raise
        else:
            progress.waiting_for = None
            return dict(group)
        if is_finished(await client.request("GET", "/api/run")):
            free.release()
            return None
        progress.waiting_for = "the trainer's last steps"
        await asyncio.sleep(POLL_S)


def is_finished(run: Mapping[str, Any]) -> bool:
    """Whether all steps of the run are trained and published."""
    return run["status"] in ("finished", "completed") or int(run["published_step"]) >= int(run["steps"])


def sessions_of(group: Json) -> list[Json]:
    """The sessions of a started group (`POST /groups`), each with the group's id and its number of samples. The greedy
    session is no sample.
    """
    samples = sum(not session.get("is_baseline") for session in group["sessions"])
    of_group = {"group_id": group["group_id"], "group_size": samples}
    return [session | of_group for session in group["sessions"]]


async def _play_group(
    episode: Callable[..., Coroutine[Any, Any, Outcome]],
    group: Json,
    free: asyncio.Semaphore,
    pace: Pace,
    progress: Progress,
    accept: Accept | None,
) -> None:
    data = group["task"]["data"]
    of_group = sessions_of(group)
    verdict = GroupVerdict(accept, data, of_group[0]["group_size"])
    played: list[asyncio.Task[Outcome]] = []
    try:
        async with asyncio.TaskGroup() as sessions:
            for session in of_group:
                own = {"is_baseline": True} if session.get("is_baseline") else {"verdict": verdict}
                start = partial(episode, data=data, session=session, **own)
                played.append(sessions.create_task(progress.session(start)))
        progress.group_done()
        pace.saw([task.result() for task in played])
    finally:
        free.release()
