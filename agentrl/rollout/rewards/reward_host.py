"""A process that runs reward functions: `python -m agentrl.rollout.rewards.reward_host SOCKET ID`.

    pool ══ {"functions", "memory_mb"} ══► load ══ {"ready": {name: facts}} or {"error"} ══► pool
    pool ══ {"id", "name", "answers", "timeout_s"} ══► call ══ {"id", "values" or "error", "rss_mb"} ══► pool

Messages are lines of JSON. A plain function runs in the main thread, one at a time, so it may use signals. Several
`async def` functions run at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
from typing import TYPE_CHECKING, Any

from agentrl.errors import AgentRLError
from agentrl.rollout.rewards.function_call import RewardFunction, Unusable, load_function
from agentrl.rollout.rewards.function_value import value_of, values_of_batch

if TYPE_CHECKING:
    from agentrl.domain.schemas import Json

LONGEST_LINE_BYTES = 256 * 2**20
LONGEST_ERROR = 1_500
NICENESS = 5
"""Functions leave the processor to agents, heartbeats and engines."""


async def main(path: str, name: str) -> None:
    """Connect, load the functions, and answer calls until the connection ends."""
    reader, writer = await asyncio.open_unix_connection(path, limit=LONGEST_LINE_BYTES)

    def send(message: Json) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(json.dumps(message).encode() + b"\n")

    send({"process": name})
    setup = json.loads(await reader.readline())
    bound = 2 * int(setup["memory_mb"]) * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    os.nice(NICENESS)
    try:
        functions = {
            name: load_function(one["function"], one["args"], one["batched"], one["field"])
            for name, one in setup["functions"].items()
        }
    except Exception as error:  # noqa: BLE001 - importing foreign code may raise anything
        send({"error": error_text(error)})
        await writer.drain()
        return
    send({"ready": {name: _facts(function) for name, function in functions.items()}})
    running: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        call = json.loads(line)
        function = functions[call["name"]]
        if function.is_async:
            task = asyncio.create_task(_answer_async(function, call, send))
            running.add(task)
            task.add_done_callback(running.discard)
        else:
            send(_answer(function, call))
            await writer.drain()


def _facts(function: RewardFunction) -> Json:
    return {"is_async": function.is_async, "batched": function.batched, "wants_ids": function.wants_ids}


def _answer(function: RewardFunction, call: Json) -> Json:
    """Call a plain function."""
    try:
        return _reply(call, function, function.call(**function.arguments(call["answers"])))
    except Exception as error:  # noqa: BLE001 - a reward function is foreign code
        return _failure(call, error)


async def _answer_async(function: RewardFunction, call: Json, send: Any) -> None:
    """Call an `async def` function, and cancel it when its time is over."""
    try:
        async with asyncio.timeout(call["timeout_s"]) as limit:
            result = await function.call(**function.arguments(call["answers"]))
        send(_reply(call, function, result))
    except Exception as error:  # noqa: BLE001 - a reward function is foreign code
        late = isinstance(error, TimeoutError) and limit.expired()
        send({"id": call["id"], "timed_out": True} if late else _failure(call, error))


def _reply(call: Json, function: RewardFunction, result: object) -> Json:
    values = values_of_batch(result, len(call["answers"])) if function.batched else [value_of(result)]
    return {"id": call["id"], "values": values, "rss_mb": _rss_mb()}


def _failure(call: Json, error: Exception) -> Json:
    return {"id": call["id"], "error": error_text(error), "final": isinstance(error, Unusable), "rss_mb": _rss_mb()}


def error_text(error: BaseException) -> str:
    """Format an error: of ours the message alone, of other code with its type."""
    text = str(error) if isinstance(error, AgentRLError) else f"{type(error).__name__}: {error}"
    return text[:LONGEST_ERROR].encode(errors="replace").decode()


def _rss_mb() -> float:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20
    except OSError:  # not Linux: the peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    sys.stdout = sys.stderr
    asyncio.run(main(*sys.argv[1:]))
