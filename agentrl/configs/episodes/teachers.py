"""Who teaches: `trainer.teacher`, one teacher for all tasks or one for each of their sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from agentrl.configs.episodes.task_sources import LONGEST_NAME, MAX_SOURCES
from agentrl.configs.section import Seconds, Section, plain_address

POLICY = "policy"
"""The teacher that is the policy itself, with its present weights."""
UPSTREAM = "upstream:"
"""Prefix of a teacher that is a server of `proxy.upstreams`."""
LONGEST_TEACHER = 1000


class TeacherServerConfig(Section):
    """How the trainer asks teachers that are servers."""

    concurrent: Annotated[int, Field(ge=1, le=1024)] = 16
    """Maximum trajectories that one rank has a server score at once."""
    timeout_s: Seconds = 120.0
    """Timeout of one request."""
    attempts: Annotated[int, Field(ge=1, le=20)] = 5
    """Requests for one trajectory before the step fails, when a server does not answer or answers with 429 or 5xx; the
    wait between them doubles, from one second to at most 30.
    """


def _known_form(value: Any) -> Any:
    if isinstance(value, str):
        return _teacher(value)
    if not isinstance(value, Mapping):
        raise ValueError("give one teacher, or a teacher for each source of tasks as SOURCE: TEACHER")
    if not 0 < len(value) <= MAX_SOURCES:
        raise ValueError(f"give 1 to {MAX_SOURCES} sources of tasks, not {len(value)}")
    for source, teacher in value.items():
        if not isinstance(source, str) or not 0 < len(source) <= LONGEST_NAME:
            raise ValueError(f"{source!r:.100} is not the name of a source of tasks")
        if not isinstance(teacher, str):
            raise ValueError(f"{source}: give a teacher, not {teacher!r:.100}")
    return {source: _teacher(teacher) for source, teacher in value.items()}


def _teacher(value: str) -> str:
    if not 0 < len(value) <= LONGEST_TEACHER:
        raise ValueError(f"a teacher has a name of 1 to {LONGEST_TEACHER} characters")
    if value == UPSTREAM:
        raise ValueError(f"{UPSTREAM} needs the name of an upstream")
    return plain_address(value, "; use proxy.upstreams with api_key_env") if "://" in value else value


Teachers = Annotated[str | dict[str, str], BeforeValidator(_known_form)]
"""A teacher, or SOURCE: TEACHER."""


def teachers_of(value: str | Mapping[str, str] | None) -> list[str]:
    """The different teachers of a value, in order."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(dict.fromkeys(value.values()))


def is_server(teacher: str) -> bool:
    """Whether a teacher is a server, which the trainer asks."""
    return "://" in teacher or teacher.startswith(UPSTREAM)


def is_folder(teacher: str) -> bool:
    """Whether a teacher is a model that the trainer loads."""
    return teacher != POLICY and not is_server(teacher)
