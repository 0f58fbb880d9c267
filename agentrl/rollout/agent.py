"""Loads the agent of a config."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentrl.domain.schemas import Json
from agentrl.errors import UserError, did_you_mean
from agentrl.rollout import command
from agentrl.rollout.command import CommandAgent
from agentrl.rollout.score import Result, Score
from agentrl.rollout.workflows.workflow_agent import WorkflowAgent, is_workflow, workflow_arguments
from agentrl.user_code import load_object

READY_MADE = {
    "single_turn": "agentrl.rollout.answering.single_turn:SingleTurn",
    "multi_turn": "agentrl.rollout.answering.multi_turn:MultiTurn",
    "tool_agent": "agentrl.rollout.tools.tool_agent:ToolAgent",
}
"""Agents that a config may name without a module."""
REWARD_THEMSELVES = {"tool_agent"}
"""Those that do not need reward functions: their tools may have rewards."""


class Agent(Protocol):
    """The interface of `agent:` in a config.

    `extra` has `base_url`, `api_key` and `http_client` (an `httpx.AsyncClient` for the SDK; leave it open), `anthropic`
    (the same three for `AsyncAnthropic`), `is_eval`, and `score` if the config has `reward`.
    `agentrl.client.AsyncClient(base_url, api_key).session()` opens a session for a sub-agent. Returns the session's
    reward, `{completion_id: reward}`, the result of `score`, a `Result` that also says which tokens train, or None when
    the agent sent its rewards itself.
    """

    async def run(self, data: Json, **extra: Any) -> float | Mapping[str, float] | Score | Result | None:
        """Run one episode of the task `data`."""


def load_agent(
    spec: str | Sequence[str] | None, args: Mapping[str, Any], *, scored: bool = False, turn_discount: float = 1.0
) -> Agent:
    """Create the agent of a config: `scored` says that the run has reward functions, and its default is then
    `single_turn`. Workflows are told the run's `turn_discount`. Raises UserError when it is missing or invalid.
    """
    if spec is None and scored:
        spec = "single_turn"
    if spec is None:
        raise UserError("agent: missing; give module:Class or a command")
    if not isinstance(spec, str):
        try:
            command.check(spec)
        except UserError as error:
            raise UserError(f"agent: {error}") from None
        if scored:
            raise UserError("reward: not supported for a command, which gives its own rewards")
        if args:
            raise UserError("agent_args: not supported for a command; give the arguments in the command")
        return CommandAgent(spec)
    if spec in READY_MADE and spec not in REWARD_THEMSELVES and not scored:
        raise UserError(f"agent: {spec} needs `reward`, which scores its answers")
    if ":" not in spec and spec not in READY_MADE:
        raise UserError(f"agent: {spec!r} must look like module:name{did_you_mean(spec, READY_MADE)}")
    factory = import_agent(spec)
    if scored and is_workflow(factory):
        raise UserError(f"reward: not supported for the workflow {spec!r}, which computes its own rewards")
    if is_workflow(factory) and not inspect.isclass(factory):
        if args:
            raise UserError(f"agent_args: {spec!r} is an instance, which takes no arguments")
        return WorkflowAgent(factory, turn_discount)
    if not callable(factory) or not (
        is_workflow(factory) or inspect.iscoroutinefunction(getattr(factory, "run", None))
    ):
        raise UserError(
            f"agent: {spec!r} must be a class with `async def run(self, data, **extra)` or "
            "`async def arun_episode(self, engine, data)`"
        )
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as error:
        raise UserError(f"agent_args: {spec!r} does not take them: {error}") from error
    if is_workflow(factory):
        return WorkflowAgent(factory(**workflow_arguments(args)), turn_discount)
    agent: Agent = factory(**args)
    return agent


def import_agent(spec: str | Sequence[str] | None) -> Any:
    """Import the class of an agent; None for a command, and for a run without an agent. Raises UserError."""
    return load_object(READY_MADE.get(spec, spec), "agent") if isinstance(spec, str) else None
