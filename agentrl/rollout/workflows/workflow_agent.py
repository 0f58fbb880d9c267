"""Runs a workflow as the agent of a run.

run(data) ─► arun_episode(engine, copy of data) ─► tensors       ─► their loss tokens and their reward
                                                ├► interactions  ─► a reward for each call
                                                └► None          ─► the session is rejected
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.errors import UserError, did_you_mean
from agentrl.rollout.score import Result, Reward, finite
from agentrl.rollout.workflows import workflow_context
from agentrl.rollout.workflows.model_io import GenerationHyperparameters
from agentrl.rollout.workflows.rollout_workflow import RolloutWorkflow
from agentrl.rollout.workflows.session_engine import SessionEngine
from agentrl.rollout.workflows.tensor_results import trained_ranges
from agentrl.rollout.workflows.workflow_context import WorkflowContext

REJECTED = "the workflow returned None"


def is_workflow(factory: object) -> bool:
    """Whether an object is a workflow or a class of workflows."""
    return inspect.iscoroutinefunction(getattr(factory, "arun_episode", None))


def workflow_arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a workflow's class: AReaL's `gconfig` may be given as a mapping. Raises UserError."""
    given = args.get("gconfig")
    if not isinstance(given, Mapping):
        return dict(args)
    known = [one.name for one in fields(GenerationHyperparameters)]
    if unknown := sorted(map(str, given.keys() - set(known))):
        raise UserError(f"agent_args.gconfig: there is no {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    return {**args, "gconfig": GenerationHyperparameters(**given)}


class WorkflowAgent:
    """An agent that runs a workflow, which all episodes share. `turn_discount` is the run's."""

    def __init__(self, workflow: RolloutWorkflow, turn_discount: float = 1.0) -> None:
        self._workflow, self._turn_discount = workflow, turn_discount

    async def run(self, data: Json, **extra: Any) -> Result:
        """Run one episode. Raises UserError for a result that does not fit the recorded calls."""
        engine = SessionEngine(extra["base_url"], extra["api_key"], extra["http_client"], self._turn_discount)
        group_id = extra.get("group_id")
        workflow_context.set(WorkflowContext(bool(extra.get("is_eval")), None if group_id is None else str(group_id)))
        async with workflow_context.http_client(engine.http.timeout):
            found = await self._workflow.arun_episode(engine, copy.deepcopy(data))
            await engine.finish()
            return result_of_workflow(found, engine)


def result_of_workflow(found: object, engine: SessionEngine) -> Result:
    """The rewards and the tokens that train. Raises UserError."""
    if found is None:
        return Result(reject=REJECTED)
    if not isinstance(found, Mapping):
        raise UserError(f"arun_episode must return a dict or None, got {type(found).__name__}")
    if "input_ids" in found:
        ranges, reward = trained_ranges(found, engine.sampled)
        return Result(rewards=(Reward(value=finite(reward)),), trained_tokens=ranges)
    if not found:
        return Result(reject="the workflow returned no call")
    unknown = [key for key, one in found.items() if not hasattr(one, "reward")]
    if unknown:
        raise UserError(f"arun_episode: {unknown[0]!r} is neither a tensor field nor an interaction with a reward")
    rewards = [(str(key), getattr(one, "reward")) for key, one in found.items()]  # noqa: B009 - foreign objects
    return Result(
        rewards=tuple(Reward(value=finite(reward), interaction_id=key) for key, reward in rewards if reward is not None)
    )
