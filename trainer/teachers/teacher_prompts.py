"""What teachers read in place of a trajectory's first prompt: `trainer.teacher_prompt`.

    first call's messages ─► function, or the text of a field ─► rendered as the recorded prompt was ─┐
    trajectory from its first sampled token on, byte for byte ────────────────────────────────────────┴─► what is read

Only the first prompt is rendered anew: outputs, tool results and later messages stay the recorded tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.domain.schemas import PROMPT_VERSION, Int32, Json, TrajectoryTokens
from agentrl.errors import RequestError, UserError
from agentrl.rendering import Renderer
from agentrl.rendering.validation import validate_messages
from agentrl.store import Database
from agentrl.store.training.paths import first_prompts
from agentrl.store.training.paths.first_prompts import FirstPrompt
from agentrl.trainer.teachers.lessons import first_sampled
from agentrl.user_code import load_function

FIELD = "trainer.teacher_prompt"

Write = Callable[[Any, list[Json]], list[Json] | None]
"""(task, messages of the first prompt) → the messages that the teacher reads; None: the trajectory is not taught."""


class TeacherPrompts:
    """Makes what teachers read, of trajectories of the store."""

    def __init__(self, write: Write, renderer: Renderer, database: Database) -> None:
        self._write, self._renderer, self._database = write, renderer, database

    def __call__(self, trajectories: Sequence[TrajectoryTokens]) -> list[TrajectoryTokens | None]:
        """The tokens that each trajectory's teacher reads; None without a prompt for it, or room in the context.

        Raises UserError for a prompt that cannot be written or rendered.
        """
        recorded = self._database.query(first_prompts.read, [one.trajectory_id for one in trajectories])
        known: dict[tuple[str, bytes], Int32 | None] = {}  # trajectories of a group mostly share their prompt
        found: list[TrajectoryTokens | None] = []
        for one in trajectories:
            prompt = one.input_ids[: first_sampled(one)]
            key = one.group_id, prompt.tobytes()
            if key not in known:
                known[key] = self._prompt(one.trajectory_id, recorded[one.trajectory_id], prompt)
            ids, most = known[key], self._renderer.max_context
            room = ids is not None and (most is None or len(ids) + one.length - len(prompt) <= most)
            found.append(after(ids, one) if ids is not None and room else None)
        return found

    def _prompt(self, trajectory_id: str, recorded: FirstPrompt, prompt: Int32) -> Int32 | None:
        """The teacher's prompt in place of `prompt`."""
        if not recorded.messages:
            raise UserError(
                f"{FIELD}: the first call {recorded.call_id} of trajectory {trajectory_id} has no messages (it is a "
                "text completion, or imported); a prompt for the teacher is written from messages"
            )
        messages = self._write(recorded.task, list(recorded.messages))
        if messages is None:
            return None
        try:
            validate_messages(messages)
            renderer, opening = rendered_as(self._renderer, recorded, prompt)
            return np.array([*renderer.render(messages, recorded.tools), *opening], np.int32)
        except RequestError as error:
            raise UserError(f"{FIELD}: trajectory {trajectory_id}: {error}") from None


def rendered_as(renderer: Renderer, recorded: FirstPrompt, prompt: Int32) -> tuple[Renderer, list[int]]:
    """The renderer, with the template options that made a recorded prompt, and the tokens that follow the rendered
    messages: the beginning of a forced tool call. Raises UserError when no options make it.
    """
    option = renderer.thinking_option
    for options in ({}, *([] if option is None else [{option: True}, {option: False}])):
        chosen = renderer.with_options(options) if options else renderer
        ids = chosen.render(list(recorded.messages), recorded.tools)
        if np.array_equal(prompt[: len(ids)], ids):
            return chosen, prompt[len(ids) :].tolist()
    raise UserError(
        f"{FIELD}: the prompt of call {recorded.call_id} cannot be rendered again from its messages: it has template "
        "options other than thinking, or its messages were changed"
    )


def after(prompt: Int32, one: TrajectoryTokens) -> TrajectoryTokens:
    """A trajectory with another prompt before its first sampled token."""
    first = first_sampled(one)

    def with_prompt(array: Any, value: Any) -> Any:
        return np.concatenate([np.full(len(prompt), value, array.dtype), array[first:]])

    return replace(
        one,
        input_ids=np.concatenate([prompt.astype(np.int32), one.input_ids[first:]]),
        loss_mask=with_prompt(one.loss_mask, False),
        logprobs=with_prompt(one.logprobs, 0),
        versions=with_prompt(one.versions, PROMPT_VERSION),
        turn_ids=with_prompt(one.turn_ids, -1),
        temperatures=with_prompt(one.temperatures, 1),
        routed=None,
    )


def with_field(field: str) -> Write:
    """Adds the text of a field of the task to the last user message; None where the task has none."""

    def write(task: Any, messages: list[Json]) -> list[Json] | None:
        text = task.get(field) if isinstance(task, dict) else None
        if text is None or text == "":
            return None
        if not isinstance(text, str):
            raise UserError(f"{FIELD}: the field {field!r} of a task holds {type(text).__name__}, not a text")
        return with_text(messages, text)

    return write


def with_text(messages: Sequence[Json], text: str) -> list[Json]:
    """Messages with a text at the end of the last user message; without one, with a further user message."""
    last = max((i for i, one in enumerate(messages) if one.get("role") == "user"), default=None)
    if last is None:
        return [*messages, {"role": "user", "content": text}]
    content = messages[last].get("content")
    longer = [*content, {"type": "text", "text": text}] if isinstance(content, list) else f"{content or ''}\n\n{text}"
    return [*messages[:last], {**messages[last], "content": longer}, *messages[last + 1 :]]


def write_of(config: TrainerConfig) -> Write | None:
    """What `teacher_prompt` means; None without one. Raises UserError for a function that cannot be loaded."""
    if config.teacher_prompt is None:
        return None
    if not config.prompts_by_function:
        return with_field(config.teacher_prompt)
    function = load_function(config.teacher_prompt, FIELD)

    def write(task: Any, messages: list[Json]) -> list[Json] | None:
        found = function(task, messages)
        if found is not None and not (isinstance(found, list) and found and all(isinstance(m, dict) for m in found)):
            raise UserError(f"{FIELD}: it must return messages, or None, not {found!r:.200}")
        return found

    return write
