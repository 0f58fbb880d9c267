"""A process that runs reward functions: `python -m agentrl.rollout.rewards.reward_host FD`.

    pool ══ {"functions", "memory_mb"} ══► load ══ {"ready": {name: facts}} or {"error"} ══► pool
    pool ══ {"id", "name", "answers", "timeout_s"} ══► call ══ {"id", "values", "answers", "stats", "rss_mb"} ══► pool
                                                        └══ {"id", "error", "rss_mb"} ══► pool

Messages are lines of JSON. A plain function runs in the main thread, one at a time and without an event loop, so it may
use signals and `asyncio.run`. Several `async def` functions run at the same time, in one event loop of another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
import threading
from typing import TYPE_CHECKING, Any

from agentrl.errors import AgentRLError
from agentrl.processes.hosted import inherited, line, rss_mb
from agentrl.rollout.rewards.function_call import RewardFunction, Unusable, load_function
from agentrl.rollout.rewards.function_value import answer_in, listed_of_batch, stats_in, value_of

if TYPE_CHECKING:
    from agentrl.domain.schemas import Json

LONGEST_LINE_BYTES = 256 * 2**20
LONGEST_ERROR = 1_500


def main(connected: str) -> None:
    """Load the functions, and answer calls until the connection (an open socket) ends."""
    connection = inherited(connected)
    lines, sending = connection.makefile("rb"), threading.Lock()

    def send(message: Json) -> None:
        with sending, contextlib.suppress(ConnectionError):
            connection.sendall(line(message))

    setup = json.loads(lines.readline(LONGEST_LINE_BYTES))
    _bound_memory(2 * int(setup["memory_mb"]) * 2**20)
    try:
        functions = {
            name: load_function(one["function"], one["args"], one["batched"], one["field"])
            for name, one in setup["functions"].items()
        }
    except Exception as error:  # noqa: BLE001 - importing foreign code may raise anything
        return send({"error": error_text(error)})
    loop = asyncio.new_event_loop()
    if any(function.is_async for function in functions.values()):
        threading.Thread(target=loop.run_forever, daemon=True).start()
    send({"ready": {name: _facts(function) for name, function in functions.items()}})
    while text := lines.readline(LONGEST_LINE_BYTES):
        call = json.loads(text)
        function = functions[call["name"]]
        if function.is_async:
            asyncio.run_coroutine_threadsafe(_answer_async(function, call, send), loop)
        else:
            send(_answer(function, call))


def _bound_memory(size_bytes: int) -> None:
    """Bound what this process and its children may each allocate, unless they already have a lower bound."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    bound = size_bytes if most == resource.RLIM_INFINITY else min(size_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


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
    found = listed_of_batch(result, len(call["answers"])) if function.batched else [result]
    values, answers = [value_of(one) for one in found], [answer_in(one) for one in found]
    stats = [stats_in(one) for one in found]
    return {"id": call["id"], "values": values, "answers": answers, "stats": stats, "rss_mb": rss_mb()}


def _failure(call: Json, error: Exception) -> Json:
    return {"id": call["id"], "error": error_text(error), "final": isinstance(error, Unusable), "rss_mb": rss_mb()}


def error_text(error: BaseException) -> str:
    """Format an error: of ours the message alone, of other code with its type."""
    text = str(error) if isinstance(error, AgentRLError) else f"{type(error).__name__}: {error}"
    return text[:LONGEST_ERROR].encode(errors="replace").decode()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # the pool is gone: threads of functions are not awaited
