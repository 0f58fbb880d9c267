"""Who teaches: what is accepted, and what is refused with the nearest valid name."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.configs.config_files import parse_config
from agentrl.configs.episodes.teachers import is_folder, is_server, teachers_of
from agentrl.errors import ConfigError

BASE = {
    "name": "r",
    "model": "tiny",
    "agent": "a:B",
    "tasks": ["data/sums.jsonl", {"path": "m:words", "name": "words"}],
    "proxy": {"upstreams": {"big": {"base_url": "http://h:1/v1"}}},
}
DISTILLED = {"algorithm": {"distill_coef": 1.0}}


def configured(trainer: Any, **changes: Any) -> Any:
    return parse_config(BASE | changes | {"trainer": DISTILLED | trainer}).trainer


@pytest.mark.parametrize(
    "teacher",
    [
        "tiny",
        "/models/big",
        "upstream:big",
        "https://h:30000/v1",
        {"sums": "tiny"},
        {"sums": "upstream:big", "words": "/models/big"},
    ],
)
def test_teachers_are_models_and_servers_for_all_tasks_or_for_sources(teacher: Any) -> None:
    assert configured({"teacher": teacher}).teacher == teacher


@pytest.mark.parametrize(
    ("trainer", "changes", "message"),
    [
        ({"teacher": {"sum": "tiny"}}, {}, "trainer.teacher: no source 'sum' in tasks; did you mean 'sums'?"),
        ({"teacher": {"x": "tiny"}}, {}, "no source 'x' in tasks; choose from sums, words"),
        ({"teacher": {"a": "tiny"}}, {"tasks": None}, "a teacher for each source needs `tasks`"),
        ({"teacher": "upstream:bigg"}, {}, "no upstream 'bigg' in proxy.upstreams; did you mean 'big'?"),
        ({"teacher": {"sums": "upstream:x"}}, {}, "no upstream 'x' in proxy.upstreams"),
        ({"teacher": "upstream:"}, {}, "needs the name of an upstream"),
        ({"teacher": {}}, {}, "give 1 to 64 sources of tasks, not 0"),
        ({"teacher": ["tiny"]}, {}, "a teacher for each source of tasks as SOURCE: TEACHER"),
        ({"teacher": {"sums": ["tiny"]}}, {}, "sums: give a teacher, not"),
        ({"teacher": {"sums": ""}}, {}, "a name of 1 to 1000 characters"),
        ({"teacher": {"sums": "x" * 1001}}, {}, "a name of 1 to 1000 characters"),
        ({"teacher": "http://user:pw@h:1"}, {}, "must not contain a password"),
        ({"teacher": "ftp://h:1"}, {}, "must be http://HOST"),
        ({"teacher": "policy"}, {}, "teacher: policy needs a teacher_prompt"),
        ({"teacher": {"sums": "policy"}}, {}, "teacher: policy needs a teacher_prompt"),
        ({"algorithm": {}, "teacher_prompt": "hint"}, {}, "teacher_prompt needs a teacher"),
        ({"teacher": "tiny", "teacher_server": {"concurrent": 0}}, {}, "trainer.teacher_server.concurrent"),
        ({"teacher": "tiny", "teacher_server": {"retries": 2}}, {}, "trainer.teacher_server.retries"),
    ],
)
def test_what_cannot_teach_is_refused_in_one_line(trainer: Any, changes: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(trainer, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_policy_teaches_itself_with_another_prompt() -> None:
    by_field = configured({"teacher": "policy", "teacher_prompt": "hint"})
    by_function = configured({"teacher": {"words": "policy"}, "teacher_prompt": "hints:write"})
    assert (by_field.prompts_by_function, by_function.prompts_by_function) == (False, True)


def test_kinds_of_teachers() -> None:
    assert teachers_of(None) == []
    assert teachers_of({"a": "x", "b": "y", "c": "x"}) == ["x", "y"]
    assert [is_server(t) for t in ("policy", "tiny", "./policy", "upstream:a", "http://h")] == [0, 0, 0, 1, 1]
    assert [is_folder(t) for t in ("policy", "tiny", "./policy", "upstream:a", "http://h")] == [0, 1, 1, 0, 0]
