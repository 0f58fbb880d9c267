"""Where tasks come from: `tasks` and `evaluation.tasks`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from agentrl.configs.section import Positive, Section
from agentrl.errors import did_you_mean

FUNCTION = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
MAX_SOURCES = 64
LONGEST_NAME = 100
LEAST_AHEAD = 16_384
"""Those that the first pass shuffles together (`domain.task_order.BLOCK`)."""


class MessageTemplate(Section):
    """A message whose text is a Jinja template."""

    role: Literal["system", "developer", "user", "assistant"]
    """The message's role."""
    content: str
    """Jinja template of the text; the task's fields are its variables."""


class TaskOrder(Section):
    """Tasks in ascending order of a number, drawn from a window that rises ([by
    difficulty](tasks.md#by-difficulty)).
    """

    by: Annotated[str, Field(min_length=1, max_length=1000)]
    """The field of the tasks that holds the number, such as `difficulty`; each task needs one."""
    width: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the source's tasks that the window has."""
    over: Annotated[int, Field(ge=1, le=2**31)] = 1000
    """Groups of this source while which the window rises from the easiest to the hardest tasks; after them, passes over
    all tasks follow.
    """


class TaskSource(Section):
    """One source of tasks ([tasks](tasks.md)). Only `path` is required."""

    path: Annotated[str, Field(min_length=1)]
    """A file (`.jsonl`, `.csv`, either with `.gz`, or `.parquet`), a pattern of files (`data/*.parquet`), a file in
    object storage (`s3://BUCKET/FILE`), a folder of `datasets.save_to_disk`, a dataset of the Hugging Face hub
    (`hf://OWNER/NAME/CONFIG:SPLIT`), or `module:function`.
    """
    name: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)] | None = None
    """Name of the source in results and metrics; null: made of `path`."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """The source's share of the groups, beside those of the other sources."""
    columns: Annotated[dict[str, str | None], Field(max_length=1000)] = Field(default_factory=dict)
    """New names of columns, as `COLUMN: FIELD`; null removes a column. Other columns keep their names."""
    prompt: str | None = None
    """Jinja template of the task's field `prompt`; the task's fields are its variables."""
    messages: Annotated[list[MessageTemplate], Field(min_length=1, max_length=100)] | None = None
    """Templates of the task's field `messages`."""
    max_prompt_tokens: Positive | None = None
    """Maximum length of the prompt (`messages`, or `prompt`), rendered for the run's model; null: any."""
    too_long: Literal["drop", "truncate", "fail"] = "drop"
    """What happens to a task with a longer prompt: it is left out, the longest text of its prompt loses its end, or
    the start fails.
    """
    limit: Positive | None = None
    """Number of rows to read, from the start; null: all."""
    ahead: Annotated[int, Field(ge=LEAST_AHEAD, le=2**31)] | None = 100_000
    """Tasks that are stored ahead of the run's data cursor; further ones follow as the run takes them, so a source may
    have any number of tasks, or no end. null: all are stored at once, as they are for `epochs`.
    """
    order: TaskOrder | None = None
    """How tasks are drawn by difficulty; all of the source's tasks are then read and stored before the run starts.
    null: in shuffled passes.
    """
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, if `path` is `module:function`."""

    @model_validator(mode="after")
    def _one_prompt(self) -> TaskSource:
        if self.prompt is not None and self.messages is not None:
            raise ValueError("give either `prompt` or `messages`")
        return self

    @model_validator(mode="after")
    def _only_functions_take_arguments(self) -> TaskSource:
        if self.args and not self.is_function:
            raise ValueError("`args` are arguments of `module:function`")
        return self

    @model_validator(mode="after")
    def _only_what_ends_has_an_order(self) -> TaskSource:
        if self.order is not None and self.may_be_endless:
            raise ValueError("`order` needs all tasks of a function: give a `limit`")
        return self

    @property
    def is_function(self) -> bool:
        """Whether the source is `module:function`."""
        return FUNCTION.match(self.path) is not None

    @property
    def may_be_endless(self) -> bool:
        """Whether the source is a function whose rows are not limited."""
        return self.is_function and self.limit is None

    @property
    def label(self) -> str:
        """`name`, else a name made of `path`: that of the file without its suffixes, of the folder, or of the
        function.
        """
        if self.name is not None:
            return self.name
        path = PurePosixPath(self.path.rpartition(":")[2] if self.is_function else self.path)
        stem = path.name.partition(".")[0] if not set("*?[") & set(path.name) else path.parent.name
        return (stem or path.parent.name or "tasks")[:LONGEST_NAME]


def _parsed(value: Any) -> Any:
    """Check sources as YAML gives them. Raises ValueError: one line with the field and the nearest name."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not 0 < len(value) <= MAX_SOURCES:
            raise ValueError(f"give 1 to {MAX_SOURCES} sources, not {len(value)}")
        return [_source(one, f"source {index}: ") for index, one in enumerate(value)]
    if isinstance(value, str | TaskSource) and value:
        return value
    if not isinstance(value, Mapping):
        raise ValueError("give a path, a source with a `path`, or a list of sources")
    return _source(value, "")


def _source(value: Any, at: str) -> Any:
    if isinstance(value, str):
        value = {"path": value}
    if not isinstance(value, Mapping):
        return value
    try:
        return TaskSource.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            hint = did_you_mean(str(first["loc"][-1]), TaskSource.model_fields) if len(first["loc"]) == 1 else ""
            raise ValueError(f"{at}unknown key {where!r}{hint}") from None
        raise ValueError(f"{at}{where + ': ' if where else ''}{first['msg']}") from None


def _names_differ(value: Any) -> Any:
    sources = sources_of(value)
    names = [source.label for source in sources]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two sources are called {repeated!r}: give each a `name`")
    return value


Tasks = Annotated[str | TaskSource | list[TaskSource], BeforeValidator(lambda v: _names_differ(_parsed(v)))]
"""A source as a string (its `path`), as a mapping, or a list of either."""


def _without_weights_and_lengths(value: Any) -> Any:
    for source in sources_of(value):
        for key in ("weight", "max_prompt_tokens", "ahead", "order"):
            if key in source.model_fields_set and getattr(source, key) != TaskSource.model_fields[key].default:
                raise ValueError(f"{key}: only for training tasks, as every held-out task is evaluated")
    return value


EvalTasks = Annotated[Tasks, AfterValidator(_without_weights_and_lengths)]
"""Sources of held-out tasks."""


def sources_of(tasks: Any) -> list[TaskSource]:
    """The sources of a value of `tasks`; none for null."""
    if isinstance(tasks, str):
        return [TaskSource(path=tasks)] if tasks else []
    if isinstance(tasks, TaskSource):
        return [tasks]
    return [one for one in tasks if isinstance(one, TaskSource)] if isinstance(tasks, list) else []
