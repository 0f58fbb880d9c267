"""Runs a program as one episode: opens a session, runs the command, ends the session, and reads its trace."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.client import AsyncClient
from agentrl.diagnosis.record import COMMAND, Session
from agentrl.diagnosis.sources import from_proxy
from agentrl.domain.schemas import Json
from agentrl.errors import UserError
from agentrl.rollout.command import environment

END_TIMEOUT_S = 30.0
KILL_AFTER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A finished episode. `status` is the command's exit status, negative for a signal."""

    session: Session
    status: int


async def play(command: Sequence[str], proxy_url: str, key: str, *, keep: bool, stdout: int | None = None) -> Episode:
    """Run `command` as one episode against a proxy. Its output is inherited, or goes to file descriptor `stdout`.

    With `keep` the session ends normally; else it is abandoned, so that it is not trained. Cancellation ends the
    command and abandons the session. Raises UserError, RequestError.
    """
    async with AsyncClient(proxy_url, key, timeout_s=END_TIMEOUT_S) as client:
        opened = await client.request("POST", "/sessions", {"metadata": {COMMAND: " ".join(command)[:200]}})
        session_id = opened["session_id"]
        keep_it = False
        try:
            status = await run(command, environment(opened["base_url"], opened["api_key"]), stdout)
            keep_it = keep
        finally:
            if not keep_it:
                await asyncio.shield(client.request("DELETE", f"/sessions/{session_id}"))
        if keep_it:
            await client.request("POST", f"/sessions/{session_id}/end", _end(status))
        return Episode(session=await from_proxy(client, session_id), status=status)


def _end(status: int) -> Json:
    if status == 0:
        return {"status": "completed"}
    return {"status": "failed", "error": f"the command ended with exit status {status}"}


async def run(command: Sequence[str], env: Mapping[str, str], stdout: int | None = None) -> int:
    """Run a program in the environment `env` with inherited input and output; returns its exit status.

    Raises UserError when it cannot be started. Cancellation sends SIGTERM, then SIGKILL after KILL_AFTER_S.
    """
    try:
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=stdout)
    except OSError as error:
        raise UserError(f"cannot run {command[0]!r}: {error.strerror}") from error
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            await asyncio.shield(_stop(process))


async def _stop(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), KILL_AFTER_S)
    except TimeoutError:
        process.kill()
        await process.wait()
