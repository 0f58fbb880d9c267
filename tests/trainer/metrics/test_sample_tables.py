"""Tables of rollouts: bounded texts, and nothing that a service would show as more than text."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from history import History
from hypothesis import given
from hypothesis import strategies as st

from agentrl.configs.metrics_config import MetricsConfig
from agentrl.configs.run_config import RunConfig
from agentrl.store import Database
from agentrl.store.training import sample_rows, steps
from agentrl.store.training.sample_rows import SampledRollout
from agentrl.trainer.metrics.metric_sinks import Trackio
from agentrl.trainer.metrics.sample_tables import COLUMNS, CUT, SampleTable, table_of

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)


def sample(**given: Any) -> SampledRollout:
    known: dict[str, Any] = {
        "session_id": "s",
        "group_id": "g",
        "task": {"q": 1},
        "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}],
        "answer": {"role": "assistant", "content": "2"},
        "calls": 1,
        "reward": 1.0,
        "episode_return": 1.0,
        "advantage": 0.5,
        "age": 1,
    }
    return SampledRollout(**(known | given))


def test_a_row_has_what_was_asked_and_answered() -> None:
    (row,) = table_of(7, [sample(answer={"content": None, "tool_calls": [CALL]})], 1000).as_dicts()
    assert tuple(row) == COLUMNS
    assert (row["step"], row["task"], row["prompt"]) == (7, '{"q":1}', "system: be brief\nuser: 1+1?")
    assert row["answer"] == 'add({"a": 1})'


@given(json_values, st.lists(json_values, max_size=4), json_values, st.integers(16, 100))
def test_texts_of_any_messages_are_bounded(task: Any, prompt: list[Any], answer: Any, most: int) -> None:
    (row,) = table_of(1, [sample(task=task, prompt=prompt, answer=answer)], most).rows
    for text in row[3:6]:
        assert isinstance(text, str)
        assert len(text.removesuffix(CUT).encode()) <= most
        assert "\0" not in text


def test_trackio_gets_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    module = ModuleType("trackio")
    module.init = lambda **_: SimpleNamespace(log=lambda row, step: logged.append(row))  # type: ignore[attr-defined]
    module.Table = lambda data: data  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    config = RunConfig(name="n", model="tiny", metrics=MetricsConfig(trackio={"project": "p"}))
    Trackio(config, "0" * 32).log(1, table_of(1, [sample(answer="<img src=x onerror=y> ![a](http://b)")], 1000))
    assert logged[0]["samples"][0]["answer"] == "&lt;img src=x onerror=y&gt; !\\[a](http://b)"


def test_the_samples_of_a_step_are_its_own_and_the_same_each_time(db: Database) -> None:
    made = History(db, seed=2)
    made.train(2)
    for step in db.query(steps.of_run, made.run_id):
        every = db.query(sample_rows.read, step.id, 1000)
        assert {one.group_id for one in every} == {part.group_id for part in made.batches[step.step].trajectories}
        few = db.query(sample_rows.read, step.id, 2)
        assert few == db.query(sample_rows.read, step.id, 2)
        assert len(few) == 2
        assert all(one in every for one in few)
        for one in every:
            assert one.prompt[0]["content"].startswith("say [")
            assert one.answer["role"] == "assistant"
            assert one.calls >= 1
            assert set(one.task) == {"n"}
    assert SampleTable([]).as_dicts() == []
