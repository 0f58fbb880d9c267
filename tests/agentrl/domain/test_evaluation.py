"""Which steps are evaluated, and what the rows of an evaluation come to."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.domain.evaluation import ATTEMPTS, Episode, Label, collect, gains, line, newest_due, schedule


def row(
    sample: int = 0,
    status: str = "completed",
    reward: float = 1.0,
    *,
    index: int = 0,
    setting: str = "s",
    version: int = 4,
    sampled_by: tuple[int, int] | None = (4, 4),
    episodes: int = 4,
) -> dict[str, Any]:
    label = Label(4, version, Episode(setting, index, sample), episodes)
    low, high = sampled_by or (None, None)
    facts = {"status": status, "fault": False, "reward": reward, "version_min": low, "version_max": high}
    return {**label.metadata, **facts}


def test_a_run_is_evaluated_first_last_and_every_so_often() -> None:
    assert schedule(None, 10) == [0, 10]
    assert schedule(4, 10) == [0, 4, 8, 10]
    assert schedule(5, 10) == [0, 5, 10]
    assert schedule(20, 10) == [0, 10]
    assert schedule(None, 0) == [0]


@pytest.mark.parametrize(("published", "due"), [(0, 0), (1, None), (3, None), (4, 4), (7, 4), (8, 8), (9, 8), (10, 10)])
def test_only_the_newest_missed_evaluation_is_due(published: int, due: int | None) -> None:
    assert newest_due(4, 10, published) == due


def test_labels_survive_metadata() -> None:
    label = Label(4, 7, Episode("greedy", 3, 1), 12)
    assert Label.of({"mine": 1, **label.metadata}) == label
    for foreign in ({}, {"evaluation": 3}, {"evaluation": {"step": 1}}, {"evaluation": {"step": "a", "version": None}}):
        assert Label.of(foreign) is None


def test_an_episode_in_which_the_policy_never_answered_is_no_reward() -> None:
    fault = {**row(1, "failed", sampled_by=None), "fault": True}
    (found,) = collect([row(0, reward=0.5), *[fault] * (ATTEMPTS - 1), row(2, "failed"), row(3, reward=1.0)])
    assert found.ended == 2
    (found,) = collect([row(0, reward=0.5), *[fault] * ATTEMPTS, *[row(2, "failed")] * ATTEMPTS, row(3, reward=1.0)])
    assert found.complete
    result = found.as_json()["settings"]["s"]
    assert (result["reward"], result["failed"], result["faults"], result["episodes"]) == (0.5, 1, 1, 3)
    said = "1 episodes failed, 1 episodes without a result: the policy did not answer"
    assert said in line(found.as_json())


def test_an_evaluation_of_faults_alone_has_no_result() -> None:
    faults = [{**row(sample, "failed", sampled_by=None), "fault": True} for sample in range(4)]
    (found,) = collect(faults * ATTEMPTS)
    assert found.complete
    result = found.as_json()["settings"]["s"]
    assert (result["reward"], result["low"], result["perfect"], result["episodes"], result["faults"]) == (
        None,
        None,
        None,
        0,
        4,
    )
    assert line(found.as_json()).startswith("evaluation of step 4: s no result, 4 episodes without a result")
    assert gains(found, found) == {}


def test_a_sample_that_fails_too_often_is_worth_nothing_and_one_that_was_abandoned_is_played_again() -> None:
    rows = [
        row(0, reward=0.5, sampled_by=(4, 5)),
        row(1, "failed"),
        row(1, reward=1.0),
        *[row(2, "failed", sampled_by=None)] * ATTEMPTS,
        *[row(3, "abandoned")] * (2 * ATTEMPTS),
    ]
    (found,) = collect(rows)
    assert (found.step, found.ended, found.complete) == (4, 3, False)
    assert found.settings["s"].rewards == {0: [0.5, 1.0, 0.0]}
    assert found.settings["s"].failed == 1
    assert line(found.as_json()) == "evaluation of step 4: 3 of 4 episodes"
    (found,) = collect([*rows, row(3, reward=0.5)])
    assert found.complete
    result = found.as_json()["settings"]["s"]
    assert (result["reward"], result["perfect"], result["tasks"], result["episodes"]) == (0.5, 0.25, 1, 4)
    assert (result["version_min"], result["version_max"]) == (4, 5)
    assert line(found.as_json()) == "evaluation of step 4: s 0.500, pass@4 1.000, 1 episodes failed, versions 4 to 5"


def test_results_are_per_version_and_ignore_foreign_sessions() -> None:
    foreign = {"mine": 1, "status": "completed", "reward": 9.0, "version_min": 4, "version_max": 4}
    found = collect([row(0, version=4), foreign, row(0, version=6, reward=0.0)])
    assert [(one.version, one.settings["s"].rewards) for one in found] == [(4, {0: [1.0]}), (6, {0: [0.0]})]


def test_answers_vote_by_setting_and_source() -> None:
    rows = [
        {**row(sample, index=index, reward=float(answer == "a")), "answer": answer}
        for index, answers in enumerate([["a", "a", "b"], ["b", "b", "a"]])
        for sample, answer in enumerate(answers)
    ]
    for one in rows:
        one["evaluation"] |= {"episodes": 6, "source": "easy" if one["evaluation"]["index"] == 0 else "hard"}
    (found,) = collect(rows)
    result = found.as_json()["settings"]["s"]
    assert result["samples"]["maj"] == {"1": 0.5, "2": 0.5, "3": 0.5}
    assert {name: of["samples"]["maj"]["3"] for name, of in result["sources"].items()} == {"easy": 1.0, "hard": 0.0}
    assert "], pass@3 1.000, maj@3 0.500 (easy" in line(found.as_json())


def test_a_sample_that_failed_has_no_answer() -> None:
    rows = [{**row(0, reward=1.0), "answer": "a"}, *[row(1, "failed")] * ATTEMPTS, row(2, reward=0.0), row(3)]
    (found,) = collect(rows)
    assert found.settings["s"].answers == {0: ["a", None, None, None]}


def test_gains_cover_the_common_settings() -> None:
    before = collect([row(index=i, reward=0.25 * i) for i in range(3)] + [row(setting="old")])[0]
    after = collect([row(index=i, reward=0.25 * i + 0.5) for i in range(3)] + [row(setting="new")])[0]
    assert gains(before, after) == {"s": {"reward": 0.5, "low": 0.5, "high": 0.5}}


def test_sources_are_reported_apart() -> None:
    rows = [
        {
            **Label(0, 0, Episode("sampled", index, 0), 4, source).metadata,
            "status": "completed",
            "fault": False,
            "reward": reward,
            "version_min": 0,
            "version_max": 0,
        }
        for index, (source, reward) in enumerate([("easy", 1.0), ("easy", 0.5), ("hard", 0.0), ("hard", 0.0)])
    ]
    (found,) = collect(rows)
    result = found.as_json()["settings"]["sampled"]
    assert result["reward"] == 0.375
    assert {name: (one["reward"], one["tasks"]) for name, one in result["sources"].items()} == {
        "easy": (0.75, 2),
        "hard": (0.0, 2),
    }
    assert "(easy 0.750" in line(found.as_json())
    assert "samples" not in result
    for row in rows:
        del row["evaluation"]["source"]
    assert "sources" not in collect(rows)[0].as_json()["settings"]["sampled"]


def test_best_of_counts_failed_samples_and_is_reported_by_source() -> None:
    def one(sample: int, score: float, reward: float) -> dict[str, Any]:
        return {**row(sample, reward=reward + score), "best_of": {"score": score, "reward": reward}}

    rows = [one(0, 0.9, 0.0), one(1, 0.5, 1.0), *[row(2, "failed")] * ATTEMPTS, one(3, 0.1, 1.0)]
    for each in rows:
        each["evaluation"] |= {"source": "easy"}
    (found,) = collect(rows)
    result = found.as_json()["settings"]["s"]
    expected = {"1": 0.5, "2": pytest.approx((3 * 0.0 + 2 * 1.0 + 1 * 1.0) / 6), "4": 0.0}
    assert result["samples"]["best_of"] == result["sources"]["easy"]["samples"]["best_of"] == expected
    assert "best_of@4 0.000" in line(found.as_json())
