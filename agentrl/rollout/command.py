"""Agents that are programs: one process runs one session and gets its inputs from environment variables.

    run(data) ─► guard ─► COMMAND    stdin is empty; stdout and stderr are inherited
                             │  OPENAI_*, ANTHROPIC_*, AGENTRL_*; the task in AGENTRL_TASK_FILE
                             ▼
                  exit status 0, and a reward in AGENTRL_REWARD_FILE unless the program sent one

The guard (agentrl/processes/guard.py) ends the program and everything that it started when the episode ends, times out
or is cancelled, and when this process dies.
"""

from __future__ import annotations

import asyncio
import codecs
import errno
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.environment import PROXY_URL, RUN_KEY, without_secrets
from agentrl.errors import AgentRLError, UserError
from agentrl.processes import children
from agentrl.visible import LINES, visible

LONGEST_TASK_BYTES = 65_536
"""Longer tasks are only in the file: Linux limits a variable to 128 KiB."""
TAIL_BYTES = 1_500
"""Bytes of stderr that an error quotes."""
DRAIN_TIMEOUT_S = 1.0
"""How long stderr is read after the command's end, since a daemon may hold it open."""


DEFAULTS = {"ANTHROPIC_MODEL": "default"}
"""Defaults of variables that are not set. Without this one Claude Code requests a Claude model."""


class CommandFailed(AgentRLError):
    """The program ended with a non-zero exit status."""


def environment(base_url: str, api_key: str) -> dict[str, str]:
    """The environment of a program that runs a session: inherited without secrets, plus the session's variables."""
    return DEFAULTS | without_secrets(os.environ) | variables(base_url, api_key)


def variables(base_url: str, api_key: str) -> dict[str, str]:
    """The variables with which SDKs and `agentrl.client` find a session. Sessions that a program opens with them are
    for sub-agents.
    """
    root, _, rest = base_url.partition("/sessions/")
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        "ANTHROPIC_AUTH_TOKEN": api_key,  # an inherited token would take precedence over the key
        PROXY_URL: root,
        RUN_KEY: api_key,
        "AGENTRL_SESSION_ID": rest.partition("/")[0],
    }


def check(command: Sequence[str]) -> None:
    """Raise UserError unless a command's program can be found and executed."""
    if not command:
        raise UserError("an empty command")
    name = command[0]
    if shutil.which(name) is None:
        why = errno.EACCES if os.sep in name and os.path.exists(name) else errno.ENOENT
        raise UserError(f"cannot run {name!r}: {os.strerror(why)}")


@dataclass(frozen=True)
class CommandAgent:
    """Runs a session by running a program."""

    command: Sequence[str]

    async def run(self, data: Json, **extra: Any) -> float | Mapping[str, float] | None:
        """Run the program; returns the content of AGENTRL_REWARD_FILE. Cancellation ends the program.

        Raises CommandFailed with the end of stderr, UserError for an invalid reward.
        """
        base_url, api_key = extra["base_url"], extra["api_key"]
        with tempfile.TemporaryDirectory(prefix="agentrl-", ignore_cleanup_errors=True) as folder:
            env = environment(base_url, api_key) | _files(Path(folder), data)
            env["AGENTRL_IS_EVAL"] = str(int(extra.get("is_eval", False)))
            status, tail = await _play(self.command, env)
            if status:
                quoted = tail.replace(api_key, "[session key]")[-TAIL_BYTES:]
                raise CommandFailed(f"{shlex.join(self.command)[:200]} ended with exit status {status}: {quoted}")
            return _reward(Path(env["AGENTRL_REWARD_FILE"]))


def _files(folder: Path, data: Json) -> dict[str, str]:
    """Write the task; returns the variables with the paths of the task and the reward."""
    task, file = json.dumps(data), folder / "task.json"
    file.write_text(task)
    found = {"AGENTRL_TASK_FILE": str(file), "AGENTRL_REWARD_FILE": str(folder / "reward.json")}
    short = len(task) <= LONGEST_TASK_BYTES  # json.dumps writes ASCII
    return found | {"AGENTRL_TASK": task if short else ""}


async def _play(command: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
    """Run the command; returns its exit status (128 + N for signal N) and the end of stderr. Cancellation ends it."""
    tail = bytearray()
    ours, its = os.pipe()  # not asyncio's pipe: asyncio reports no end while a daemon holds the pipe open
    reading = asyncio.create_task(_follow(ours, tail))
    try:
        try:
            process = await children.start(command, env=env, stdout=None, stderr=its, nice=True)
        finally:
            os.close(its)
        try:
            status = await process.wait()
            await asyncio.wait([reading], timeout=DRAIN_TIMEOUT_S)
        finally:
            if process.returncode is None:
                await asyncio.shield(children.stop(process))
    finally:
        reading.cancel()
    return status, tail.decode(errors="replace").strip()


async def _follow(pipe: int, tail: bytearray) -> None:
    """Copy a pipe to stderr and keep its end. Closes the pipe."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb", buffering=0)
    )
    try:
        while part := await stream.read(65_536):
            sys.stderr.write(visible(decoder.decode(part), LINES + "\r"))
            tail += part
            del tail[: -2 * TAIL_BYTES]  # more than is quoted, so that a key at the cut is masked
    finally:
        transport.close()


def _reward(file: Path) -> float | Mapping[str, float] | None:
    """Read the reward file. Raises UserError for anything but a number, {completion_id: number} or nothing."""
    text = file.read_text(errors="replace").strip() if file.exists() else ""
    if not text:
        return None
    try:
        reward = json.loads(text)
    except (ValueError, RecursionError):
        reward = text
    if isinstance(reward, (str, list, bool)):
        raise UserError(f"AGENTRL_REWARD_FILE: {text[:100]!r} is neither a number nor {{completion_id: number}}")
    found: float | Mapping[str, float] | None = reward
    return found
