"""Find the user's code (`module:name`), and turn what an agent returns into rewards."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from agentrl.domain.schemas import Json
from agentrl.errors import UserError, did_you_mean
from agentrl.rollout import command
from agentrl.rollout.command import CommandAgent

MAX_TASKS = 100_000


class Agent(Protocol):
    """What `agent:` in a config names.

    `extra` holds `base_url`, `api_key` and `http_client` (an `httpx.AsyncClient` to hand to the SDK; do not close it),
    `anthropic` (the same three for `AsyncAnthropic`, with the client of the library that it takes), and `is_eval`.
    `agentrl.client.AsyncClient(base_url, api_key).session()` opens a session for a sub-agent. Returns the session's
    reward, `{completion_id: reward}`, or None when the agent rewarded by itself.
    """

    async def run(self, data: Json, **extra: Any) -> float | Mapping[str, float] | None:
        """Play one episode of the task `data`."""


def load_object(spec: str, field: str) -> Any:
    """Import `module:name`. Raises UserError naming `field` and the nearest name that exists."""
    module_name, sep, name = spec.partition(":")
    if not sep or not module_name or not name:
        raise UserError(f"{field}: {spec!r} must look like module:name")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the user's own module, beside the config
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"{field}: cannot import {module_name!r}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
        raise UserError(f"{field}: {module_name!r} has no {name!r}{did_you_mean(name, public)}") from None


def load_agent(spec: str | Sequence[str] | None, args: Mapping[str, Any]) -> Agent:
    """Build the agent of a config. Raises UserError when it is no agent, or none is named."""
    if spec is None:
        raise UserError("agent: the config names none; it must look like module:Class, or be a command")
    if not isinstance(spec, str):
        try:
            command.check(spec)
        except UserError as error:
            raise UserError(f"agent: {error}") from None
        if args:
            raise UserError("agent_args: a command takes none; write its arguments behind its name")
        return CommandAgent(spec)
    factory = load_object(spec, "agent")
    if not callable(factory) or not inspect.iscoroutinefunction(getattr(factory, "run", None)):
        raise UserError(f"agent: {spec!r} must be a class with `async def run(self, data, **extra)`")
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as error:
        raise UserError(f"agent_args: {spec!r} does not take them: {error}") from error
    agent: Agent = factory(**args)
    return agent


def load_tasks(spec: str | None, *, seed: int = 0, limit: int = MAX_TASKS, field: str = "tasks") -> list[Json]:
    """Tasks of a JSONL file or of `module:function` (called with `seed` when it takes one), at most `limit`."""
    if spec is None:
        raise UserError(f"{field}: the config names none; it must be a JSONL file or module:function")
    tasks = _read_jsonl(Path(spec), field) if spec.endswith(".jsonl") else _call_for_tasks(spec, seed, field)
    kept = list(islice(tasks, limit))
    if not kept:
        raise UserError(f"{field}: {spec!r} yields no task")
    for index, task in enumerate(kept):
        if not isinstance(task, dict):
            raise UserError(f"{field}: item {index} of {spec!r} is {type(task).__name__}, not a mapping")
    return kept


def _call_for_tasks(spec: str, seed: int, field: str) -> Iterable[Any]:
    function = load_object(spec, field)
    if not callable(function):
        raise UserError(f"{field}: {spec!r} is no function")
    args = {"seed": seed} if "seed" in inspect.signature(function).parameters else {}
    tasks = function(**args)
    if not isinstance(tasks, Iterable):
        raise UserError(f"{field}: {spec!r} returned {type(tasks).__name__}, not an iterable of mappings")
    return tasks


def _read_jsonl(path: Path, field: str) -> Iterable[Any]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"{field}: cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise UserError(f"{field}: {path} line {number} is not JSON: {error}") from error


def rewards_of(result: object) -> list[tuple[str | None, float]]:
    """`(completion id or None for the session, value)` of what `run` returned. Raises UserError for anything else."""
    if result is None:
        return []
    if isinstance(result, Mapping):
        return [(str(key), _finite(value)) for key, value in result.items()]
    return [(None, _finite(result))]


def _finite(value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"an agent must return a number, {{completion_id: number}} or None, got {value!r}") from None
    if not math.isfinite(number):
        raise UserError(f"an agent returned the reward {number}")
    return number
