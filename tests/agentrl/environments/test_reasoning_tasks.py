"""Generators of reasoning-gym as a source: names, weights, settings, examples, splits; scores are the library's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from gyms import needs_gyms

from agentrl.configs.config_files import load_config
from agentrl.configs.episodes.task_sources import TaskSource
from agentrl.data.task_shape import MAX_TASK_BYTES
from agentrl.data.task_stream import TaskStream, load_tasks
from agentrl.environments.exact_json import decoded
from agentrl.environments.reasoning_score import ReasoningScore
from agentrl.environments.reasoning_tasks import COMPOSITE, is_held_out, make, names, tasks
from agentrl.errors import UserError

pytestmark = needs_gyms
SOURCE = "agentrl.environments.reasoning_tasks:tasks"
ODD = [
    "",
    " ",
    "odd ((( text",
    "1/0",
    "[[",
    "nan",
    "inf",
    "é\x00",
    '{"a":',
    "1,2;3 4",
    "None",
    "-" * 3000,
    "[[1, 'a']]",
]


def question_of(task: dict[str, Any]) -> str:
    return str(task["reasoning_gym"]["entry"]["question"])


def score(task: dict[str, Any], completion: str, **args: Any) -> float:
    """As a run scores it: the task has been JSON in between."""
    return ReasoningScore(**args)(completion, json.loads(json.dumps(task)))


def of_library(task: dict[str, Any], answer: str) -> float:
    """The library's score of an answer to an item that it generates anew."""
    about = task["reasoning_gym"]
    dataset = make(about["name"], about["config"] | {"seed": about["seed"], "size": 500}, about["name"])
    entry = dataset[about["index"]]
    assert entry["question"] == about["entry"]["question"]
    return float(dataset.score_answer(answer=answer, entry=entry))


def test_a_source_of_a_config_gives_the_same_tasks_for_the_same_seed() -> None:
    source = TaskSource(path=SOURCE, args={"datasets": {"gcd": {"weight": 3}, "coin_flip": {}}, "size": 200})
    with TaskStream(source, seed=4) as stream:
        first, again, behind = stream.tasks(200), stream.tasks(200), list(stream.batches(150))
    with TaskStream(source, seed=5) as stream:
        other = stream.tasks(200)
    assert first == again != other
    assert [json.loads(text) for batch in behind for text in batch.texts] == first[150:]
    assert 120 < sum(task["data_source"] == "gcd" for task in first) < 180
    assert len({question_of(task) for task in first if task["data_source"] == "gcd"}) > 100


def test_two_settings_of_one_generator_have_labels_of_their_own() -> None:
    datasets = {
        "small": {"name": "gcd", "config": {"max_value": 9}},
        "large": {"name": "gcd", "config": {"min_value": 100}},
    }
    found = list(tasks(datasets, size=40))
    assert {task["data_source"] for task in found} == {"small", "large"}
    values: dict[str, list[int]] = {"small": [], "large": []}
    for task in found:
        values[task["data_source"]] += map(int, re.findall(r"\d+", question_of(task)))
    assert max(values["small"]) <= 9
    assert min(values["large"]) >= 100


def test_examples_are_turns_or_text_and_never_the_question_itself() -> None:
    for task in tasks(["gcd"], size=30, examples=2, tag="answer"):
        asked, said, *_, last = task["messages"]
        assert [message["role"] for message in task["messages"]] == ["user", "assistant"] * 2 + ["user"]
        assert question_of(task) in last["content"]
        assert question_of(task) not in asked["content"]
        assert last["content"].endswith("between <answer> and </answer>.")
        assert said["content"].startswith("<answer>")
    (task,) = tasks(["gcd"], size=1, examples=2, examples_as="text", instruction="Be brief.")
    (message,) = task["messages"]
    assert message["content"].startswith("Be brief.\n\nQuestion: ")
    assert message["content"].count("\nAnswer:") == 3
    assert message["content"].endswith(f"Question: {question_of(task)}\nAnswer:")


def test_held_out_questions_are_never_shown_in_training() -> None:
    settings = {"size": 300, "examples": 2}
    training = list(tasks(["coin_flip", "gcd"], split="train", **settings))
    held_out = {question_of(task) for task in tasks(["coin_flip", "gcd"], split="heldout", **settings)}
    shown = "\n".join(message["content"] for task in training for message in task["messages"])
    assert held_out
    assert all(map(is_held_out, held_out))
    assert not any(f"{question}\n" in f"{shown}\n" for question in held_out)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"datasets": "gdc"}, "reasoning-gym has no 'gdc'; did you mean 'gcd'?"),
        ({"datasets": []}, "names no generator"),
        (
            {"datasets": {"gcd": {"wieght": 2}}},
            "datasets.gcd.wieght: Extra inputs are not permitted; did you mean 'wei",
        ),
        ({"datasets": {"gcd": {"weight": 0}}}, "datasets.gcd.weight: Input should be greater than 0"),
        (
            {"datasets": {"gcd": {"config": {"max_valu": 2}}}},
            "datasets.gcd: reasoning-gym refuses its settings: .*max_va",
        ),
        ({"datasets": {"gcd": {"config": {"min_value": -1}}}}, "reasoning-gym refuses its settings"),
        ({"datasets": "rush_hour", "examples": 1}, "rush_hour has no reference answers"),
        ({"datasets": "gcd", "examples": 99}, "examples from 0 to 15"),
        ({"datasets": "gcd", "split": "test"}, "must be train or heldout"),
        (
            {"datasets": {"coin_flip": {"config": {"min_trials": 1, "max_trials": 1}}}, "split": "heldout"},
            "coin_flip has too few different questions for `heldout`",
        ),
        ({"dataset": "gcd"}, "does not take the arguments in `args`: got an unexpected keyword argument 'dataset'"),
    ],
)
def test_a_wrong_setting_is_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_tasks(TaskSource(path=SOURCE, args=args), limit=1)


def test_an_answer_is_found_by_tag_by_pattern_or_is_the_whole_text() -> None:
    (tagged,) = tasks(["gcd"], size=1, tag="answer")
    (plain,) = tasks(["gcd"], size=1)
    right = plain["answer"]
    assert score(tagged, f"I think\n<answer> {right} </answer>") == 1.0
    assert score(tagged, right) == 0.0
    assert score(plain, f" {right}\n") == 1.0
    assert score(plain, f"{right} or so, #### {right}", pattern=r"#### *(.*)") == 1.0
    assert score(plain, right, pattern=r"#### *(.*)") == 0.0


def test_partial_credit_is_kept() -> None:
    (task,) = tasks(["letter_counting"], size=1)
    answer = f"It is {task['answer']}."
    assert 0 < score(task, answer) == of_library(task, answer) < 1


def test_an_answer_that_a_generator_cannot_read_earns_nothing(caplog: pytest.LogCaptureFixture) -> None:
    (task,) = tasks(["prime_factorization"], size=1)
    with pytest.raises(ValueError, match="invalid literal"):
        of_library(task, "no idea")
    assert score(task, "no idea") == 0.0
    assert "prime_factorization cannot read the answer 'no idea': ValueError" in caplog.text


def test_a_task_of_another_source_is_refused() -> None:
    with pytest.raises(UserError, match="no field 'reasoning_gym'"):
        ReasoningScore()("1", {"prompt": "?"})


@pytest.mark.parametrize(
    ("name", "generators"),
    [("counting", {"letter_counting", "gcd"}), ("logic", {"syllogism", "coin_flip"})],
)
def test_the_configs_of_the_repository_give_tasks(name: str, generators: set[str]) -> None:
    config = load_config(Path(__file__).parents[3] / "agents" / f"{name}.yaml")
    training = load_tasks(config.tasks, seed=config.seed, limit=64)["puzzles"]
    held_out = load_tasks(config.evaluation.tasks, limit=config.evaluation.size)["heldout"]
    assert {task["data_source"] for task in training} == generators
    assert all(is_held_out(question_of(task)) for task in held_out)
    assert not any(is_held_out(question_of(task)) for task in training)
    assert all(len(task["messages"]) == 5 for task in training)
    assert all(score(task, task["answer"]) == 1.0 for task in held_out)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_each_generator_gives_tasks_and_scores_as_the_library_does() -> None:
    """All of them, with answers of the library, of other items, and odd texts."""
    assert len(names()) >= 106
    composite = {"datasets": [{"name": "gcd", "config": {"max_value": 9}}, {"name": "leg_counting", "weight": 2}]}
    for name in names():
        config = composite if name == COMPOSITE else {}
        found = list(tasks({name: {"config": config}}, size=3, seed=11))
        other = decoded(found[1]["reasoning_gym"]["entry"])["answer"]
        for task in found:
            about, right = task["reasoning_gym"], task.get("answer")
            assert len(json.dumps(task)) < MAX_TASK_BYTES, name
            dataset = make(name, config | {"seed": about["seed"], "size": 500}, name)
            entry = decoded(json.loads(json.dumps(about["entry"])))
            assert dataset[about["index"]] == entry, name
            for answer in [one for one in (right, other, *ODD) if isinstance(one, str)]:
                try:
                    expected = float(dataset.score_answer(answer=answer.strip(), entry=entry))
                except Exception:  # noqa: BLE001 - the library's
                    expected = 0.0
                assert score(task, answer) == expected, (name, answer)
            if isinstance(right, str):
                assert score(task, right) == 1.0, name
