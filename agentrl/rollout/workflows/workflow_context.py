"""What a workflow may ask about the episode that it runs: `workflow_context.get()`, `workflow_context.stat_scope()`."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkflowContext:
    """The episode's facts. `task_id` is the id of its group; None outside of an episode."""

    is_eval: bool = False
    task_id: str | None = None


OUTSIDE = WorkflowContext()
_current: ContextVar[WorkflowContext] = ContextVar("workflow_context", default=OUTSIDE)


def get() -> WorkflowContext:
    """The context of the running episode."""
    return _current.get()


def set(context: WorkflowContext) -> None:
    """Set the context of the running episode. Other episodes keep theirs."""
    _current.set(context)


def stat_scope() -> str:
    """`eval-rollout` in an evaluation, else `rollout`."""
    return "eval-rollout" if get().is_eval else "rollout"
