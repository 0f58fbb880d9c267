"""The conversation with which a ready-made agent starts, from a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.errors import UserError

PROMPTS = ("messages", "prompt", "question")
"""Fields of a task that hold its prompt; the first one that it has counts."""


def messages_of(task: Json, *, system: str | None = None, template: str | None = None) -> list[Json]:
    """The messages of a task. A text becomes a user message, as `template` says. `system` comes first, unless the task
    has a system message. Raises UserError.
    """
    if template is not None:
        try:
            prompt: Any = template.format_map(task)
        except (KeyError, ValueError, IndexError, AttributeError) as error:
            raise UserError(f"agent_args.template: cannot be filled with the task's fields: {error!r}") from None
    else:
        field = next((name for name in PROMPTS if task.get(name)), None)
        if field is None:
            raise UserError(f"the task has neither {', '.join(PROMPTS[:-1])} nor {PROMPTS[-1]}; it has {_names(task)}")
        prompt = task[field]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not all(isinstance(one, Mapping) and "role" in one for one in prompt):
        raise UserError("the task's prompt must be a text or a list of messages")
    if system is not None and prompt[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *prompt]
    return list(prompt)


def _names(task: Json) -> str:
    return ", ".join(sorted(map(str, task))[:10]) or "no field"
